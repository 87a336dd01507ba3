"""`LLM`: a model in this process."""

import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, overload

from .errors import NybbleError, RequestError, SettingError
from .loading import Loaded, load
from .runtime.engine import Engine
from .runtime.outputs import Piece, RequestOutput, TextScore
from .runtime.sampling_params import SamplingParams
from .runtime.sequence import Request
from .runtime.sequence import Sequence as Running
from .runtime.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model, opened from an artifact folder or a GGUF file and run in this process. A GGUF file runs on our
    own kernels, at its own bits in Q4_0, Q4_1 and Q8_0 and else in 8; the alias `smollm2` names one where
    there is no such path.

    - `device`: "auto", or a device profile by name or file; it decides threads, memory, context and cache.
    - `executor`: "cpu", our own kernels, the same bits whatever else runs; "ort", ONNX Runtime; "auto" is the
      first on a CPU.
    - `format`: which half of the artifact, "gptq" or "onnx"; "auto" prefers the GPTQ half on our kernels and
      the ONNX half on ONNX Runtime.
    - `providers`: ONNX Runtime execution providers, best first, in place of the device's; a profile's options
      for them hold.
    - `memory_budget`: bytes, a size ("600MB") or a share of the device's memory (0.5).
    - `max_model_len`: the context in tokens. `max_batch_tokens`: most new tokens of one step.
    - `max_sequences`: the most requests that run at once, fewer where memory allows fewer. `kv_dtype`:
      "f32", "f16", or on our kernels "int8".
    - `cache`: whether our kernels keep the weights as they read them in a file, in the artifact's folder
      `cache` or else the user's cache folder, and map that file from then on.
    - `speculation`: what guesses tokens ahead, which changes none of them: "ngram", the text itself; the path
      of a smaller model with the same tokens, which counts toward the memory budget; "off"; "auto", "ngram"
      on our kernels. As much is guessed as is measured to pay.

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
        speculation: str | Path = "auto",
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
            speculation=speculation,
        )
        self._start(loaded)

    @classmethod
    def from_loaded(cls, loaded: Loaded) -> Self:
        """An `LLM` over an executor that is open already."""
        llm = cls.__new__(cls)
        llm._start(loaded)
        return llm

    def _start(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._engine = Engine(
            loaded.executor,
            loaded.tokenizer,
            max_model_len=loaded.max_model_len,
            max_batch_tokens=loaded.max_batch_tokens,
            max_sequences=loaded.max_sequences,
            eos_token_ids=loaded.eos_token_ids,
            generation_config=loaded.generation_config,
            speculator=loaded.speculator,
        )
        self._ids = itertools.count()
        self._lock = threading.RLock()
        self._closed = False

    @property
    def tokenizer(self) -> Tokenizer:
        return self._loaded.tokenizer

    @property
    def max_model_len(self) -> int:
        """The context in tokens, prompt and answer together."""
        return self._loaded.max_model_len

    @overload
    def generate(self, prompts: Prompt, sampling_params: SamplingParams | None = None) -> RequestOutput: ...

    @overload
    def generate(
        self,
        prompts: list[str] | Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]: ...

    def generate(
        self, prompts: Any, sampling_params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> RequestOutput | list[RequestOutput]:
        """Answers one prompt, or several at once: text, or token ids. No chat template is applied, and
        special tokens written in a text are plain characters. One `RequestOutput` for one prompt, else a
        list in the prompts' order. `sampling_params` are for all, or one for each.

        Raises `RequestError` for a prompt that cannot run, before any of them does.
        """
        if isinstance(prompts, str) or _is_ids(prompts):
            return self._run([prompts], _params_for(1, sampling_params))[0]
        prompts = list(prompts)
        return self._run(prompts, _params_for(len(prompts), sampling_params))

    def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **options: Any,
    ) -> RequestOutput:
        """The model's answer to a conversation, a list of `{"role": ..., "content": ...}`, through its chat
        template; `options` reach the template (`enable_thinking=False`)."""
        ids = self.apply_chat_template(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **options
        )
        return self._run([ids], _params_for(1, sampling_params))[0]

    def stream(
        self,
        prompt_or_messages: Prompt | Messages,
        sampling_params: SamplingParams | None = None,
        **options: Any,
    ) -> "TokenStream":
        """The answer to a prompt, or to a conversation, piece by piece as it is made. Closing the stream, or
        dropping it, ends the request and frees its pages."""
        prompt: Any = prompt_or_messages
        if not isinstance(prompt, str) and len(prompt) and isinstance(prompt[0], Mapping):
            prompt = self.apply_chat_template(prompt, **options)
        elif options:
            raise SettingError(f"{', '.join(options)}: only a conversation takes template options")
        with self._lock:
            return TokenStream(self, self._add(prompt, sampling_params or SamplingParams()))

    def score(self, text: Prompt) -> TextScore:
        """Log-probability of each token of a text, or of token ids, given those before it."""
        with self._lock:
            sequence = self._add(text, SamplingParams(), score=True)
            self._finish([sequence])
            return TextScore(sequence.request.prompt_ids, (None, *sequence.scores))

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
        """Ends what runs and frees the model. May be called again."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._engine.abort_all()
                self._loaded.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _add(self, prompt: Any, params: SamplingParams, score: bool = False) -> Running:
        if self._closed:
            raise RequestError("the model is closed")
        if not isinstance(params, SamplingParams):
            raise SettingError(f"sampling_params is a {type(params).__name__}; expected SamplingParams")
        if isinstance(prompt, str):
            ids, text = self.encode(prompt), prompt
            if not prompt:
                raise RequestError("the prompt is empty; expected some text")
        elif _is_ids(prompt) or (isinstance(prompt, Sequence) and not len(prompt)):
            ids, text = self.tokenizer.check_ids(prompt), None
        else:
            raise RequestError(f"a prompt is a {type(prompt).__name__}; expected text or token ids")
        request = Request(str(next(self._ids)), tuple(ids), params, prompt=text, score=score)
        return self._engine.add(request)

    def _run(self, prompts: list[Any], params: list[SamplingParams]) -> list[RequestOutput]:
        with self._lock:
            sequences: list[Running] = []
            try:
                for number, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
                    try:
                        sequences.append(self._add(prompt, each))
                    except NybbleError as error:
                        if len(prompts) == 1:
                            raise
                        raise type(error)(f"prompt {number}: {error}") from error
                self._finish(sequences)
            finally:
                for sequence in sequences:
                    self._engine.abort(sequence.request.id)
            return [sequence.output() for sequence in sequences]

    def _finish(self, sequences: list[Running]) -> None:
        """Steps until all have ended; whatever interrupts it, none of them is left running."""
        try:
            while not all(sequence.finished for sequence in sequences):
                self._engine.step()
        finally:
            for sequence in sequences:
                self._engine.abort(sequence.request.id)
        for sequence in sequences:
            if sequence.error is not None:
                raise sequence.error

    def _next_piece(self, sequence: Running) -> Piece | None:
        """The sequence's next piece, or None at its end. Others that run advance with it."""
        with self._lock:
            while not sequence.pieces and not sequence.finished and not self._closed:
                self._engine.step()
            if sequence.pieces:
                return sequence.pieces.popleft()
            if sequence.error is not None:
                raise sequence.error
            return None

    def _abort(self, sequence: Running) -> None:
        with self._lock:
            self._engine.abort(sequence.request.id)


class TokenStream(Iterator[Piece]):
    """An answer as it is made: an iterator of `Piece`s. After `close`, or an interrupt, the request has ended
    and its pages are free; `output` is the answer so far, whole once the iterator is at its end."""

    def __init__(self, llm: LLM, sequence: Running) -> None:
        self._llm = llm
        self._sequence = sequence

    def __next__(self) -> Piece:
        try:
            piece = self._llm._next_piece(self._sequence)
        except BaseException:
            self.close()
            raise
        if piece is None:
            raise StopIteration
        return piece

    @property
    def output(self) -> RequestOutput:
        return self._sequence.output()

    def close(self) -> None:
        self._llm._abort(self._sequence)

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
        # Dropped before its end, as when a loop over it is left.
        self.close()


def _is_ids(prompt: Any) -> bool:
    """Whether it is one prompt of token ids: a flat sequence of integers, not empty."""
    return (
        not isinstance(prompt, str | bytes | Mapping)
        and hasattr(prompt, "__len__")
        and len(prompt) > 0
        and hasattr(prompt[0], "__index__")
    )


def _params_for(count: int, given: SamplingParams | Sequence[SamplingParams] | None) -> list[SamplingParams]:
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * count
    if len(given) != count:
        raise SettingError(f"there are {len(given)} sampling_params for {count} prompts")
    return list(given)
