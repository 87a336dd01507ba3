"""`AsyncTokenStream`: an answer as it is made, for asyncio."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Self

from .errors import RequestError
from .llm import LLM
from .requests import Asked
from .runtime.outputs import Piece, RequestOutput
from .runtime.sinks import Ended, Event, Refused
from .streams import AnswerSoFar


class AsyncSink:
    """Events for tasks of the event loop that runs now."""

    def __init__(self, *, streaming: bool) -> None:
        self.streaming = streaming
        self.event_loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event] = asyncio.Queue()
        self.put, self.get = events.put_nowait, events.get


class AsyncTokenStream(AsyncIterator[Piece]):
    """An answer as it is made: an async iterator of `Piece`s. Several tasks of one event loop may read one
    stream: each piece goes to one of them. When one is cancelled while it waits, or the stream is dropped,
    the request ends within a step."""

    def __init__(self, ask: Callable[[], Awaitable[tuple[LLM, Asked]]]) -> None:
        self._ask = ask
        self._starting = asyncio.Lock()
        self._reading: tuple[LLM, AsyncSink, AnswerSoFar] | None = None
        self._left = False

    async def __anext__(self) -> Piece:
        try:
            _, sink, answer = self._reading or await self._start()
            while not answer.ended:
                event = await sink.get()
                if isinstance(event, Ended | Refused):
                    sink.put(event)  # for other readers
                if (piece := answer.take(event)) is not None:
                    return piece
        except BaseException:
            self._leave()
            raise
        raise StopAsyncIteration

    async def _start(self) -> tuple[LLM, AsyncSink, AnswerSoFar]:
        async with self._starting:
            if self._reading is None:
                if self._left:
                    raise StopAsyncIteration
                llm, asked = await self._ask()
                self._reading = llm, AsyncSink(streaming=True), AnswerSoFar(asked)
                llm._loop.submit([asked.request], self._reading[1])
            return self._reading

    @property
    def output(self) -> RequestOutput:
        """The answer as far as it was read; whole once the iterator is at its end."""
        return self._answer.output

    @property
    def dropped_messages(self) -> int:
        """How many of a conversation's oldest messages were left out; known with the first piece."""
        return self._answer.asked.dropped_messages

    @property
    def _answer(self) -> AnswerSoFar:
        if self._reading is None:
            raise RequestError("the stream has no output yet; it begins with its first piece")
        return self._reading[2]

    async def aclose(self) -> None:
        """Ends the request; its pages are free when this returns. Pieces that were not read are lost."""
        if self._leave() and self._reading is not None:
            _, sink, _ = self._reading
            while not isinstance(event := await sink.get(), Ended | Refused):
                pass
            sink.put(event)

    def _leave(self) -> bool:
        """Whether there was still something to leave."""
        self._left = True
        if self._reading is None or self._reading[2].ended:
            return False
        llm, _, answer = self._reading
        answer.leave()
        llm._loop.abort([answer.asked.request.id])
        return True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        self._leave()
