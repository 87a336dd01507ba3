"""`TokenStream`: an answer as it is made."""

from collections.abc import Iterator
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Self

from .errors import NybbleError, RequestError
from .requests import Asked
from .runtime.outputs import FinishReason, Piece, RequestOutput
from .runtime.sequence import Sequence as Running
from .runtime.sinks import Ended, Event, Refused, ThreadSink

if TYPE_CHECKING:
    from .llm import LLM


class AnswerSoFar:
    """What a stream's reader has read of an answer. `ended` once there is no more to read."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.ended = False
        self._sequence: Running | None = None
        self._pieces: list[Piece] = []
        self._finish_reason: FinishReason | None = None

    def take(self, event: Event) -> Piece | None:
        """The event's piece; None when there is none. Raises the request's error."""
        if isinstance(event, Piece):
            self._pieces.append(event)
            return event
        if isinstance(event, Refused):
            self.ended = True
            raise event.error
        self._sequence = event.sequence
        if isinstance(event, Ended) and not self.ended:
            self.ended = True
            self._finish_reason = event.sequence.finish_reason
            if event.error is not None:
                raise event.error
        return None

    def leave(self) -> None:
        """The reader wants no more."""
        if not self.ended:
            self.ended, self._finish_reason = True, "abort"

    @property
    def output(self) -> RequestOutput:
        """The answer as far as it was read."""
        if self._sequence is None:
            raise RequestError("the stream has no output yet; it begins with its first piece")
        output = self.asked.output(self._sequence)
        if self._finish_reason in ("stop", "length"):
            return output
        answer = output.outputs[0]
        read = len(self._pieces)
        answer = replace(
            answer,
            text="".join(piece.text for piece in self._pieces),
            token_ids=tuple(piece.token_id for piece in self._pieces),
            logprobs=None if answer.logprobs is None else answer.logprobs[:read],
            finish_reason=self._finish_reason,
            stop_reason=None,
        )
        return replace(output, outputs=(answer,))


class TokenStream(Iterator[Piece]):
    """An answer as it is made: an iterator of `Piece`s. Several threads may read one stream: each piece goes
    to one of them. After an interrupt, or when the stream is dropped, the request ends within a step."""

    def __init__(self, llm: "LLM", asked: Asked) -> None:
        self._llm = llm
        self._sink = ThreadSink(streaming=True)
        self._answer = AnswerSoFar(asked)
        try:
            llm._loop.submit([asked.request], self._sink)
            self._answer.take(self._sink.get())
        except NybbleError:
            raise
        except BaseException:
            self._abort()
            raise

    def __next__(self) -> Piece:
        if self._answer.ended:
            raise StopIteration
        try:
            event = self._sink.get()
            if isinstance(event, Ended):
                self._sink.put(event)  # for other readers
            piece = self._answer.take(event)
        except BaseException:
            self._answer.leave()
            self._abort()
            raise
        if piece is None:
            raise StopIteration
        return piece

    @property
    def output(self) -> RequestOutput:
        """The answer as far as it was read; whole once the iterator is at its end."""
        return self._answer.output

    @property
    def dropped_messages(self) -> int:
        """How many of a conversation's oldest messages were left out."""
        return self._answer.asked.dropped_messages

    def close(self) -> None:
        """Ends the request; its pages are free when this returns. Pieces that were not read are lost."""
        if self._answer.ended:
            return
        self._answer.leave()
        self._abort()
        if not self._llm._loop.on_thread:
            while not isinstance(event := self._sink.get(), Ended):
                pass
            self._sink.put(event)

    def _abort(self) -> None:
        self._llm._loop.abort([self._answer.asked.request.id])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # Dropped before its end, as when a loop over it is left. Nothing may be waited for here.
        if not self._answer.ended:
            self._abort()
