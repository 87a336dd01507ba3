"""`LLM`: a model in this process."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, Unpack, overload

from .errors import RequestError
from .loading import Loaded, load
from .requests import Asked, Messages, Overflow, Prompt, RequestMaker, Scheduling, named
from .runtime.engine import Engine
from .runtime.engine_loop import EngineLoop
from .runtime.outputs import RequestOutput, TextScore
from .runtime.sampling_params import SamplingParams
from .runtime.saved_prefix import load_prefix, save_prefix
from .runtime.sequence import Sequence as Running
from .runtime.sinks import Ended, Event, Refused, ThreadSink
from .runtime.statistics import EngineStatistics, StepStatistics
from .runtime.tokenizer import Tokenizer
from .streams import TokenStream


class LLM:
    """A model, opened from an artifact folder, a GPTQ, AWQ or bitsandbytes checkpoint, or a GGUF file, and
    run in this process. Where there is no such path, a hub id (`ORG/NAME` or `ORG/NAME@REVISION`) names one
    that the local Hugging Face cache has, and the alias `smollm2` a GGUF file. A GGUF file runs on our own
    kernels, at its own bits in Q4_0, Q4_1 and Q8_0 and else in 8.

    - `device`: "auto", or a device profile by name or file; it decides threads, memory, context and cache.
    - `executor`: "cpu", our own kernels, the same bits whatever else runs; "ort", ONNX Runtime; "auto" is the
      first on a CPU.
    - `format`: which half of the artifact, "gptq" (or "bnb", which one in NF4 or of method int8 has) or
      "onnx"; "auto" prefers the checkpoint on our kernels and the ONNX half on ONNX Runtime.
    - `providers`: ONNX Runtime execution providers, best first, in place of the device's; a profile's options
      for them hold.
    - `memory_budget`: bytes, a size ("600MB") or a share of the device's memory (0.5), which this process
      keeps to. On our kernels weights past it are streamed from disk, and requests share what is left.
    - `scratch_folder`: where files without a name go that a budget may need: preempted requests' pages, and
      streamed weights where no packed file is kept. By default TMPDIR, else `/var/tmp`.
    - `max_model_len`: the context in tokens. `max_batch_tokens`: most new tokens of one step.
    - `max_sequences`: the most requests that run at once, fewer where memory allows fewer. `kv_dtype`:
      "f32", "f16", or on our kernels "int16" and "int8" (integers with a scale for each token and head).
    - `cache`: whether our kernels keep the weights as they read them in a file, in the artifact's folder
      `cache` or else the user's cache folder, and map that file from then on.
    - `target_token_ms`: how long a step in which answers go on may be made by the prompts of others, in
      milliseconds; without one, 2.95 times what it takes without them.
    - `speculation`: what guesses tokens ahead, which changes none of them: "ngram", the text itself; the path
      of a smaller model with the same tokens, which counts toward the memory budget; "off"; "auto", "ngram"
      on our kernels. As much is guessed as is measured to pay.

    - `low_power`: less energy for slower answers: half of the threads that it would have, unless `threads`
      says how many.
    - `tuned`: whether what `nybble tune` found for this model on this CPU stands in for the defaults of
      threads, token budget, KV type and speculation, where `device` is "auto" and our kernels run.

    - `max_waiting`, `max_waiting_tokens`: how many requests, and tokens of theirs, may wait before another is
      refused with `QueueFull`; not bounded by default.
    - `share_prefixes`, `min_shared_tokens`: whether a prompt's beginning is taken from what was computed
      before, and the fewest tokens for which it is.
    - `on_step`: called after each step, or several that came in one call, on the model's thread, with its
      `StepStatistics`.

    Several threads may use it at once: their requests run together, on a thread of the model's own.

    What is not given comes from the device. Raises `ModelFormatError` for a path that is no sound model,
    `DoesNotFitError` with the numbers before loading what is too large, `SettingError` for settings.
    A context manager: leaving it frees the model.
    """

    def __init__(
        self,
        path: str | Path,
        device: str = "auto",
        executor: str = "auto",
        format: str = "auto",
        *,
        providers: Sequence[str] | None = None,
        threads: int | None = None,
        memory_budget: int | float | str | None = None,
        max_model_len: int | None = None,
        max_batch_tokens: int | None = None,
        max_sequences: int = 16,
        kv_dtype: str | None = None,
        cache: bool = True,
        target_token_ms: float | None = None,
        speculation: str | Path = "auto",
        low_power: bool = False,
        tuned: bool = True,
        scratch_folder: str | Path | None = None,
        max_waiting: int | None = None,
        max_waiting_tokens: int | None = None,
        share_prefixes: bool = True,
        min_shared_tokens: int | None = None,
        on_step: Callable[[StepStatistics], None] | None = None,
    ) -> None:
        loaded = load(
            path,
            device=device,
            executor=executor,
            format=format,
            providers=providers,
            threads=threads,
            memory_budget=memory_budget,
            max_model_len=max_model_len,
            max_batch_tokens=max_batch_tokens,
            max_sequences=max_sequences,
            kv_dtype=kv_dtype,
            cache=cache,
            target_token_ms=target_token_ms,
            speculation=speculation,
            low_power=low_power,
            tuned=tuned,
            scratch_folder=scratch_folder,
        )
        self._start(
            loaded,
            max_waiting=max_waiting,
            max_waiting_tokens=max_waiting_tokens,
            share_prefixes=share_prefixes,
            min_shared_tokens=min_shared_tokens,
            on_step=on_step,
        )

    @classmethod
    def from_loaded(cls, loaded: Loaded, **settings: Any) -> Self:
        """An `LLM` over an executor that is open already; `settings` are the engine's."""
        llm = cls.__new__(cls)
        llm._start(loaded, **settings)
        return llm

    def _start(self, loaded: Loaded, **settings: Any) -> None:
        self._loaded = loaded
        try:
            engine = self._make_engine(loaded, settings)
        except BaseException:
            loaded.close()
            raise
        self._requests = RequestMaker(loaded.tokenizer, loaded.max_model_len, engine.prepare)
        self._loop = EngineLoop(engine, loaded.close)

    @staticmethod
    def _make_engine(loaded: Loaded, settings: Mapping[str, Any]) -> Engine:
        return Engine(
            loaded.executor,
            loaded.tokenizer,
            max_model_len=loaded.max_model_len,
            max_batch_tokens=loaded.max_batch_tokens,
            max_sequences=loaded.max_sequences,
            eos_token_ids=loaded.eos_token_ids,
            generation_config=loaded.generation_config,
            speculator=loaded.speculator,
            target_token_ms=loaded.target_token_ms,
            bandwidth=loaded.bandwidth,
            swap_file=loaded.swap_file,
            explain_shortage=loaded.explain_shortage,
            **settings,
        )

    @property
    def tokenizer(self) -> Tokenizer:
        return self._loaded.tokenizer

    @property
    def max_model_len(self) -> int:
        """The context in tokens, prompt and answer together."""
        return self._loaded.max_model_len

    @overload
    def generate(
        self,
        prompts: Prompt,
        sampling_params: SamplingParams | None = None,
        **scheduling: Unpack[Scheduling],
    ) -> RequestOutput: ...

    @overload
    def generate(
        self,
        prompts: list[str] | Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **scheduling: Unpack[Scheduling],
    ) -> list[RequestOutput]: ...

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **scheduling: Unpack[Scheduling],
    ) -> RequestOutput | list[RequestOutput]:
        """Answers one prompt, or several at once: text, or token ids. No chat template is applied, and
        special tokens written in a text are plain characters. One `RequestOutput` for one prompt, else a
        list in the prompts' order. `sampling_params` are for all, or one for each; `scheduling` is
        `priority`, `deadline`, `on_context_end` and `n_keep`, as `nybble.requests.Scheduling` says.

        Raises `RequestError` for a prompt that cannot run, before any of them does.
        """
        asked, single = self._requests.of_prompts(prompts, sampling_params, scheduling)
        outputs = [each.output(sequence) for each, sequence in zip(asked, self._run(asked), strict=True)]
        return outputs[0] if single else outputs

    def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        on_overflow: Overflow = "drop",
        **options: Any,
    ) -> RequestOutput:
        """The model's answer to a conversation, a list of `{"role": ..., "content": ...}`, through its chat
        template; `options` reach the template (`tools`, `enable_thinking=False`), but for `generate`'s
        scheduling.

        A conversation that leaves no room for the answer (`max_tokens`, at most a quarter of the context)
        loses its oldest turns, never its system message nor its last turn; `dropped_messages` of the output
        says how many messages that were. With `on_overflow="refuse"` it is taken whole, and `RequestError`
        raised when it is longer than the context.
        """
        asked = self._requests.of_chat(messages, sampling_params, on_overflow, **options)
        return asked.output(self._run([asked])[0])

    def stream(
        self,
        prompt_or_messages: Prompt | Messages,
        sampling_params: SamplingParams | None = None,
        *,
        on_overflow: Overflow = "drop",
        **options: Any,
    ) -> TokenStream:
        """The answer to a prompt, or to a conversation as `chat` takes it, piece by piece as it is made. The
        model does not wait for the reader. Closing the stream, or dropping it, ends the request and frees its
        pages."""
        return TokenStream(
            self, self._requests.of_either(prompt_or_messages, sampling_params, on_overflow, **options)
        )

    def score(self, text: Prompt) -> TextScore:
        """Log-probability of each token of a text, or of token ids, given those before it."""
        return score_of(self._run([self._requests.of_score(text)])[0])

    def statistics(self) -> EngineStatistics:
        """What runs now, and what was done since the model was opened, as between two steps."""
        return self._loop.call(lambda engine: engine.statistics)

    def save_prefix(self, path: str | Path, text_or_messages: Prompt | Messages) -> int:
        """Computes a text, token ids or the beginning of a conversation, writes what the cache then holds of
        it to a file, in whole pages, and returns how many tokens that is. Raises `RequestError` where it is
        less than a page, and `OutputError`."""
        loaded, asked = self._loaded, self._requests.of_prefix(text_or_messages)
        self._run([asked])
        return self._use(
            lambda engine: save_prefix(
                Path(path), loaded.digest, loaded.executor, engine.cache, asked.request.prompt_ids
            )
        )

    def load_prefix(self, path: str | Path) -> int:
        """Puts a prefix that `save_prefix` wrote into the cache, where it stays; prompts that begin with it
        find it. Returns how many tokens it has. Raises `ModelFormatError` for a file that is damaged or of
        another model or cache, and `OutOfPagesError` where there is no room."""
        loaded = self._loaded
        return self._use(
            lambda engine: len(load_prefix(Path(path), loaded.digest, loaded.executor, engine.cache))
        )

    def _use(self, function: Callable[[Engine], int]) -> int:
        if self._loop.closed:
            raise RequestError("the model is closed")
        return self._loop.call(function)

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of a text, as `generate` sees it. Special tokens written in it are plain characters
        unless `parse_special`."""
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens, parse_special=parse_special)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def count_tokens(self, text_or_messages: str | Messages) -> int:
        """How many tokens a text, or a conversation with the start of the answer, takes of the context."""
        if isinstance(text_or_messages, str):
            return len(self.encode(text_or_messages))
        return len(self.apply_chat_template(text_or_messages))

    @overload
    def apply_chat_template(
        self, messages: Messages, *, tokenize: Literal[True] = True, **options: Any
    ) -> list[int]: ...

    @overload
    def apply_chat_template(self, messages: Messages, *, tokenize: Literal[False], **options: Any) -> str: ...

    def apply_chat_template(
        self,
        messages: Messages,
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> list[int] | str:
        """A conversation through the model's template: token ids to run, or with `tokenize=False` the text to
        look at."""
        tokenizer = self.tokenizer
        apply = tokenizer.encode_chat if tokenize else tokenizer.render_chat
        return apply(messages, add_generation_prompt=add_generation_prompt, tools=tools, **options)

    def close(self) -> None:
        """Ends what runs (`finish_reason` "abort") and the model's threads, and frees it. May be called
        again, and from any thread."""
        self._loop.close()

    def __del__(self) -> None:
        if hasattr(self, "_loop"):
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self, asked: list[Asked]) -> list[Running]:
        """Waits until all have ended; whatever interrupts it, none of them is left running."""
        sink, ended = ThreadSink(streaming=False), dict[str, Running]()
        try:
            self._loop.submit([each.request for each in asked], sink)
            while len(ended) < len(asked):
                take_end(sink.get(), ended, len(asked))
        except BaseException:
            self._loop.abort(each.request.id for each in asked)
            raise
        return [ended[each.request.id] for each in asked]


def take_end(event: Event, ended: dict[str, Running], count: int) -> None:
    """Notes the end of one of `count` requests, or raises its error."""
    if isinstance(event, Refused):
        raise event.error if count == 1 else named(event.error, event.index)
    if isinstance(event, Ended):
        if event.error is not None:
            raise event.error
        ended[event.sequence.request.id] = event.sequence


def score_of(sequence: Running) -> TextScore:
    if sequence.finish_reason == "abort":
        raise RequestError("the model was closed before the score was complete")
    return TextScore(sequence.request.prompt_ids, (None, *sequence.scores))
