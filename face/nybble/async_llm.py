"""`AsyncLLM`: a model in this process, for asyncio."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Self, overload

from .async_streams import AsyncSink, AsyncTokenStream
from .errors import RequestError
from .llm import LLM, score_of, take_end
from .requests import Asked, Messages, Overflow, Prompt
from .runtime.outputs import RequestOutput, TextScore
from .runtime.sampling_params import SamplingParams
from .runtime.sequence import Sequence as Running
from .runtime.tokenizer import Tokenizer


def open_llm(*args: Any, **settings: Any) -> LLM:
    return LLM(*args, **settings)


class AsyncLLM:
    """`LLM` for asyncio: the same settings and methods, to be awaited. Tasks of several event loops, and
    threads through an `LLM` that is given in place of a path, may use one model at once.

        async with AsyncLLM("smollm2-int4") as llm:
            async for piece in llm.stream("Once upon a time"):
                print(piece.text, end="")

    The model is loaded in a thread, when the context manager is entered, at `load` or with the first request,
    which raise what `LLM` does. A task that is cancelled ends its requests within a step.
    """

    def __init__(self, model: "str | Path | LLM", *args: Any, **settings: Any) -> None:
        self._open: Callable[[], LLM] = lambda: open_llm(model, *args, **settings)
        self._loading: Future[LLM] | None = None
        self._lock = threading.Lock()
        self._closed = False
        if isinstance(model, LLM):
            if args or settings:
                raise TypeError("an LLM that is open takes no settings")
            self._loading = Future()
            self._loading.set_result(model)

    async def load(self) -> None:
        """Opens the model where that has not been done."""
        await self._model()

    async def _model(self) -> LLM:
        with self._lock:
            if self._closed:
                raise RequestError("the model is closed")
            if self._loading is None:
                self._loading = Future()
                # Once it runs, a task that is cancelled does not cancel it for others.
                self._loading.set_running_or_notify_cancel()
                threading.Thread(
                    target=self._load, args=(self._loading,), name="nybble-load", daemon=True
                ).start()
            loading = self._loading
        return loading.result() if loading.done() else await asyncio.wrap_future(loading)

    def _load(self, loading: "Future[LLM]") -> None:
        try:
            llm = self._open()
        except BaseException as error:
            with self._lock:
                self._loading = None  # another try may do better
            loading.set_exception(error)
        else:
            loading.set_result(llm)

    def _loaded(self) -> LLM:
        loading = self._loading
        if loading is None or not loading.done():
            raise RequestError("the model is not loaded yet; await load() first")
        return loading.result()

    @property
    def tokenizer(self) -> Tokenizer:
        return self._loaded().tokenizer

    @property
    def max_model_len(self) -> int:
        """The context in tokens, prompt and answer together."""
        return self._loaded().max_model_len

    @overload
    async def generate(
        self, prompts: Prompt, sampling_params: SamplingParams | None = None
    ) -> RequestOutput: ...

    @overload
    async def generate(
        self,
        prompts: list[str] | Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]: ...

    async def generate(
        self, prompts: Any, sampling_params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> RequestOutput | list[RequestOutput]:
        """Answers one prompt or several, as `LLM.generate` does."""
        llm = await self._model()
        asked, single = await asyncio.to_thread(llm._requests.of_prompts, prompts, sampling_params)
        ended = await self._run(llm, asked)
        outputs = [each.output(sequence) for each, sequence in zip(asked, ended, strict=True)]
        return outputs[0] if single else outputs

    async def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        on_overflow: Overflow = "drop",
        **options: Any,
    ) -> RequestOutput:
        """The model's answer to a conversation, as `LLM.chat` gives it."""
        llm = await self._model()
        asked = await asyncio.to_thread(
            llm._requests.of_chat, messages, sampling_params, on_overflow, **options
        )
        return asked.output((await self._run(llm, [asked]))[0])

    def stream(
        self,
        prompt_or_messages: Prompt | Messages,
        sampling_params: SamplingParams | None = None,
        *,
        on_overflow: Overflow = "drop",
        **options: Any,
    ) -> AsyncTokenStream:
        """The answer to a prompt or a conversation, as `LLM.stream` gives it, with `async for`. The request
        begins, or is refused, with the first piece."""

        async def ask() -> tuple[LLM, Asked]:
            llm = await self._model()
            asked = await asyncio.to_thread(
                llm._requests.of_either, prompt_or_messages, sampling_params, on_overflow, **options
            )
            return llm, asked

        return AsyncTokenStream(ask)

    async def score(self, text: Prompt) -> TextScore:
        """Log-probability of each token of a text, or of token ids, given those before it."""
        llm = await self._model()
        asked = await asyncio.to_thread(llm._requests.of_score, text)
        return score_of((await self._run(llm, [asked]))[0])

    async def close(self) -> None:
        """Ends what runs and frees the model, as `LLM.close` does."""
        with self._lock:
            self._closed = True
            loading = self._loading
        if loading is not None:
            try:
                llm = await asyncio.wrap_future(loading)
            except Exception:
                return  # it could not be loaded, which another has been told
            await asyncio.to_thread(llm.close)

    async def __aenter__(self) -> Self:
        await self.load()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def _run(self, llm: LLM, asked: list[Asked]) -> list[Running]:
        """Waits until all have ended; a task that is cancelled leaves none of them running."""
        sink, ended = AsyncSink(streaming=False), dict[str, Running]()
        try:
            llm._loop.submit([each.request for each in asked], sink)
            while len(ended) < len(asked):
                take_end(await sink.get(), ended, len(asked))
        except BaseException:
            llm._loop.abort(each.request.id for each in asked)
            raise
        return [ended[each.request.id] for each in asked]
