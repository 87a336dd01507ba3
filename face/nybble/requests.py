"""From what a caller asks to `Request`s: what `LLM` and `AsyncLLM` share."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypedDict

from .chat_fit import fit_chat
from .errors import NybbleError, RequestError, SettingError
from .records import dataclass
from .runtime.outputs import RequestOutput
from .runtime.sampling_params import SamplingParams
from .runtime.sequence import OnContextEnd, Request
from .runtime.sequence import Sequence as Running
from .runtime.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]
Overflow = Literal["drop", "refuse"]


class Scheduling(TypedDict, total=False):
    """How requests are run beside others.

    - `priority`: a whole number; a higher one comes first, but waiting makes up for a lower one.
    - `deadline`: seconds after which a request that has not ended fails with `DeadlineExceeded`.
    - `on_context_end`: at the context's end an answer stops ("stop", the default); a request that might come
      there is refused ("error"); or the answer goes on from the first `n_keep` tokens and the later half of
      the others ("slide").
    """

    priority: int
    deadline: float | None
    on_context_end: OnContextEnd
    n_keep: int


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
    """Checks prompts and settings and makes requests of them. Safe to use from several threads. `prepare`
    does what takes long for a request's settings: here, and not on the engine's thread, where all would
    wait."""

    def __init__(
        self, tokenizer: Tokenizer, max_model_len: int, prepare: Callable[[SamplingParams], None]
    ) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._prepare = prepare
        self._ids = itertools.count()

    def of_prompts(
        self,
        prompts: Any,
        params: SamplingParams | Sequence[SamplingParams] | None,
        scheduling: Scheduling,
    ) -> tuple[list[Asked], bool]:
        """`generate`'s requests, and whether it was one prompt and not a list."""
        single = isinstance(prompts, str) or _is_ids(prompts)
        each = [prompts] if single else list(prompts)
        asked = []
        for number, (prompt, settings) in enumerate(zip(each, _params_for(len(each), params), strict=True)):
            try:
                asked.append(Asked(self._request(prompt, settings, scheduling)))
            except NybbleError as error:
                if len(each) == 1:
                    raise
                raise named(error, number) from error
        return asked, single

    def of_chat(
        self, messages: Messages, params: SamplingParams | None, on_overflow: Overflow, **options: Any
    ) -> Asked:
        """A conversation's request, without its oldest turns where it has outgrown the context. `options` are
        those of `Scheduling` and the template's."""
        if on_overflow not in ("drop", "refuse"):
            raise SettingError(f"on_overflow is {on_overflow!r}; expected drop or refuse")
        options, scheduling = _split({"add_generation_prompt": True, "tools": None, **options})
        max_tokens = _checked(params).max_tokens

        def encode(some: Messages) -> list[int]:
            return self._tokenizer.encode_chat(some, **options)

        if on_overflow == "refuse":
            return Asked(self._request(encode(messages), params, scheduling))
        ids, dropped = fit_chat(messages, encode, self._max_model_len, max_tokens)
        return Asked(self._request(ids, params, scheduling), dropped)

    def of_either(
        self,
        prompt_or_messages: Prompt | Messages,
        params: SamplingParams | None,
        on_overflow: Overflow,
        **options: Any,
    ) -> Asked:
        """A prompt's or a conversation's, to be streamed."""
        settings = _checked(params)
        if settings.best_of is not None and settings.best_of > settings.n:
            raise SettingError(
                f"best_of is {settings.best_of}, more than n {settings.n}; answers that are chosen at their "
                "end cannot be streamed"
            )
        prompt: Any = prompt_or_messages
        if not isinstance(prompt, str) and len(prompt) and isinstance(prompt[0], Mapping):
            return self.of_chat(prompt, params, on_overflow, **options)
        options, scheduling = _split(options)
        if options:
            raise SettingError(f"{', '.join(options)}: only a conversation takes template options")
        return Asked(self._request(prompt, params, scheduling))

    def of_score(self, text: Prompt) -> Asked:
        return Asked(self._request(text, None, {}, score=True))

    def of_prefix(self, prompt_or_messages: Prompt | Messages) -> Asked:
        """A request that computes a text or the beginning of a conversation, and as little more as can be."""
        prompt: Any = prompt_or_messages
        if not isinstance(prompt, str) and len(prompt) and isinstance(prompt[0], Mapping):
            prompt = self._tokenizer.encode_chat(prompt, add_generation_prompt=False, tools=None)
        return Asked(self._request(prompt, SamplingParams(max_tokens=1), {}))

    def _request(
        self, prompt: Any, params: SamplingParams | None, scheduling: Scheduling, *, score: bool = False
    ) -> Request:
        params = _checked(params)
        if unknown := [name for name in scheduling if name not in _SCHEDULING]:
            raise TypeError(f"unexpected argument {unknown[0]!r}")
        for name in ("priority", "n_keep"):
            value = scheduling.get(name, 0)
            if isinstance(value, bool) or not isinstance(value, int):
                raise SettingError(f"{name} is {value!r}; expected a whole number")
        deadline = scheduling.get("deadline")
        if isinstance(deadline, bool) or not isinstance(deadline, int | float | None):
            raise SettingError(f"deadline is {deadline!r}; expected seconds, or None")
        if isinstance(prompt, str):
            if not prompt:
                raise RequestError("the prompt is empty; expected some text")
            ids, text = self._tokenizer.encode(prompt), prompt
        elif _is_ids(prompt) or (isinstance(prompt, Sequence) and not len(prompt)):
            ids, text = self._tokenizer.check_ids(prompt), None
        else:
            raise RequestError(f"a prompt is a {type(prompt).__name__}; expected text or token ids")
        self._prepare(params)
        return Request(str(next(self._ids)), tuple(ids), params, prompt=text, score=score, **scheduling)


def named(error: NybbleError, number: int) -> NybbleError:
    """The error of one of several prompts says which one's it is."""
    return type(error)(f"prompt {number}: {error}")


_SCHEDULING = frozenset(Scheduling.__annotations__)


def _split(options: dict[str, Any]) -> tuple[dict[str, Any], Scheduling]:
    """A template's options, and those of `Scheduling` among them."""
    scheduling: Any = {name: options[name] for name in options if name in _SCHEDULING}
    return {name: value for name, value in options.items() if name not in _SCHEDULING}, scheduling


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
