"""From what a caller asks to `Request`s: what `LLM` and `AsyncLLM` share."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from .chat_fit import fit_chat
from .errors import NybbleError, RequestError, SettingError
from .runtime.outputs import RequestOutput
from .runtime.sampling_params import SamplingParams
from .runtime.sequence import Request
from .runtime.sequence import Sequence as Running
from .runtime.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]
Overflow = Literal["drop", "refuse"]


@dataclass(frozen=True, eq=False)
class Asked:
    """A request, and how many of a conversation's messages were left out of it."""

    request: Request
    dropped_messages: int = 0

    def output(self, sequence: Running) -> RequestOutput:
        """What the request gave so far."""
        output = sequence.output()
        return replace(output, dropped_messages=self.dropped_messages) if self.dropped_messages else output


class RequestMaker:
    """Checks prompts and settings and makes requests of them. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._ids = itertools.count()

    def of_prompts(
        self, prompts: Any, params: SamplingParams | Sequence[SamplingParams] | None
    ) -> tuple[list[Asked], bool]:
        """`generate`'s requests, and whether it was one prompt and not a list."""
        single = isinstance(prompts, str) or _is_ids(prompts)
        each = [prompts] if single else list(prompts)
        asked = []
        for number, (prompt, settings) in enumerate(zip(each, _params_for(len(each), params), strict=True)):
            try:
                asked.append(Asked(self._request(prompt, settings)))
            except NybbleError as error:
                if len(each) == 1:
                    raise
                raise named(error, number) from error
        return asked, single

    def of_chat(
        self, messages: Messages, params: SamplingParams | None, on_overflow: Overflow, **options: Any
    ) -> Asked:
        """A conversation's request, without its oldest turns where it has outgrown the context."""
        if on_overflow not in ("drop", "refuse"):
            raise SettingError(f"on_overflow is {on_overflow!r}; expected drop or refuse")
        options = {"add_generation_prompt": True, "tools": None, **options}
        max_tokens = _checked(params).max_tokens

        def encode(some: Messages) -> list[int]:
            return self._tokenizer.encode_chat(some, **options)

        if on_overflow == "refuse":
            return Asked(self._request(encode(messages), params))
        ids, dropped = fit_chat(messages, encode, self._max_model_len, max_tokens)
        return Asked(self._request(ids, params), dropped)

    def of_either(
        self,
        prompt_or_messages: Prompt | Messages,
        params: SamplingParams | None,
        on_overflow: Overflow,
        **options: Any,
    ) -> Asked:
        """A prompt's or a conversation's."""
        prompt: Any = prompt_or_messages
        if not isinstance(prompt, str) and len(prompt) and isinstance(prompt[0], Mapping):
            return self.of_chat(prompt, params, on_overflow, **options)
        if options:
            raise SettingError(f"{', '.join(options)}: only a conversation takes template options")
        return Asked(self._request(prompt, params))

    def of_score(self, text: Prompt) -> Asked:
        return Asked(self._request(text, SamplingParams(), score=True))

    def _request(self, prompt: Any, params: SamplingParams | None, *, score: bool = False) -> Request:
        params = _checked(params)
        if isinstance(prompt, str):
            if not prompt:
                raise RequestError("the prompt is empty; expected some text")
            ids, text = self._tokenizer.encode(prompt), prompt
        elif _is_ids(prompt) or (isinstance(prompt, Sequence) and not len(prompt)):
            ids, text = self._tokenizer.check_ids(prompt), None
        else:
            raise RequestError(f"a prompt is a {type(prompt).__name__}; expected text or token ids")
        return Request(str(next(self._ids)), tuple(ids), params, prompt=text, score=score)


def named(error: NybbleError, number: int) -> NybbleError:
    """The error of one of several prompts says which one's it is."""
    return type(error)(f"prompt {number}: {error}")


def _is_ids(prompt: Any) -> bool:
    """Whether it is one prompt of token ids: a flat sequence of integers, not empty."""
    return (
        not isinstance(prompt, str | bytes | Mapping)
        and hasattr(prompt, "__len__")
        and len(prompt) > 0
        and hasattr(prompt[0], "__index__")
    )


def _checked(params: SamplingParams | None) -> SamplingParams:
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise SettingError(f"sampling_params is a {type(params).__name__}; expected SamplingParams")
    return params


def _params_for(
    count: int, given: SamplingParams | Sequence[SamplingParams] | None
) -> Sequence[SamplingParams | None]:
    if given is None or isinstance(given, SamplingParams) or not isinstance(given, Sequence):
        return [_checked(given)] * count
    if len(given) != count:
        raise SettingError(f"there are {len(given)} sampling_params for {count} prompts")
    return given
