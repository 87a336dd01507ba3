"""`SamplingParams`: how one request's tokens are chosen and when it ends."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from ..errors import SettingError
from ..records import dataclass

MAX_SEED = 2**64 - 1
MAX_TOP_K = 2**31 - 1  # no vocabulary has as many: more mean the same


@dataclass(frozen=True)
class SamplingParams:
    """Settings of one request, under vLLM's names. `None` is unset: the model's `generation_config.json`
    decides, else the neutral value, which is greedy decoding to the context's end.

    - `temperature`: 0 is greedy; otherwise logits are divided by it.
    - `top_k`: keep the k most likely tokens; 0 or -1 keeps all.
    - `top_p`: keep the smallest set of most likely tokens that holds this share of the probability.
    - `min_p`: keep tokens at least this share as likely as the most likely one.
    - `repetition_penalty`: positive logits of tokens already in the prompt or answer are divided by it,
      negative ones multiplied (https://arxiv.org/abs/1909.05858).
    - `seed`: the same seed gives the same tokens, whatever else runs; unset draws one.
    - `max_tokens`, `min_tokens`: length of the answer; until `min_tokens` no stop token can be chosen and
      no stop string is looked for.
    - `stop`: strings that end the answer and are cut from it. `stop_token_ids`: further tokens that end it.
    - `ignore_eos`: the model's own end tokens do not end it.
    - `presence_penalty`, `frequency_penalty`: -2 to 2, taken from the logits of tokens that are in the answer
      already, once, and for each time they are.
    - `logit_bias`: token id to what is added to its logit, -100 to 100.
    - `logprobs`: how many of the most likely tokens to report for each position, besides the chosen one; the
      log-probabilities are the model's own, before bias, penalties, temperature, constraint and filters.
    - `json_schema`, `json_object`, `regex`, `grammar` (Lark): what the answer's text must be. At most one of
      them. The schema is a dict or its JSON; `json_object` asks for any JSON object. An answer that ends by
      its length or a stop string is the beginning of such a text.
    - `n`: answers to the prompt. `best_of`: how many are made, of which the `n` most likely are given.

    Raises `SettingError` for a value out of range.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    json_schema: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    grammar: str | None = None
    n: int = 1
    best_of: int | None = None

    def __post_init__(self) -> None:
        _number(self, "temperature", lambda x: x >= 0, "0 (greedy) or more")
        _integer(self, "top_k", lambda x: x >= -1, "1 or more; 0 or -1 keeps every token")
        _number(self, "top_p", lambda x: 0 < x <= 1, "more than 0 and at most 1")
        _number(self, "min_p", lambda x: 0 <= x <= 1, "0 to 1")
        _number(self, "repetition_penalty", lambda x: x > 0, "more than 0")
        _integer(self, "seed", lambda x: 0 <= x <= MAX_SEED, "0 to 2**64 - 1")
        _integer(self, "max_tokens", lambda x: x >= 1, "1 or more")
        _integer(self, "min_tokens", lambda x: x >= 0, "0 or more")
        _integer(self, "logprobs", lambda x: x >= 0, "0 or more")
        for name in ("presence_penalty", "frequency_penalty"):
            _number(self, name, lambda x: -2 <= x <= 2, "-2 to 2")
        _integer(self, "n", lambda x: x >= 1, "1 or more")
        _integer(self, "best_of", lambda x: x >= self.n, f"n, which is {self.n}, or more")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise SettingError(f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}")
        if any(not isinstance(s, str) or not s for s in self.stop_strings):
            raise SettingError(f"stop is {self.stop!r}; expected strings that are not empty")
        ids = self.stop_token_ids
        if isinstance(ids, str | bytes) or any(type(i) is not int or i < 0 for i in ids):
            raise SettingError(f"stop_token_ids is {ids!r}; expected token ids, 0 or more")
        object.__setattr__(self, "stop_token_ids", tuple(ids))
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        self._check_constraint()

    def _check_constraint(self) -> None:
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise SettingError(f"{name} is {value!r}; expected text that is not empty")
        if self.json_schema is not None and not isinstance(self.json_schema, str | Mapping):
            raise SettingError(
                f"json_schema is a {type(self.json_schema).__name__}; expected a dict or its JSON"
            )
        if not isinstance(self.json_object, bool):
            raise SettingError(f"json_object is {self.json_object!r}; expected True or False")
        names = ("json_schema", "json_object", "regex", "grammar")
        given = [name for name in names if getattr(self, name) not in (None, False)]
        if len(given) > 1:
            raise SettingError(f"{' and '.join(given)} are given; expected at most one constraint")

    @property
    def constrained(self) -> bool:
        """Whether the answer's text has to be of some form."""
        return self.json_object or not (self.json_schema is self.regex is self.grammar is None)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def resolve(self, generation_config: Mapping[str, Any]) -> "ResolvedSampling":
        """Every field decided. `generation_config` is the content of the model's `generation_config.json`,
        read as transformers reads it: without `do_sample: true` the model's default is greedy, whatever
        temperature it names; its other values count as soon as there is sampling. Raises `SettingError`
        when a value taken from it is out of range."""
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        given = {name: getattr(self, name) for name in names}
        defaults: dict[str, Any] = {name: generation_config.get(name) for name in names}
        if generation_config.get("do_sample") is not True:
            defaults["temperature"] = 0.0
        try:
            default = SamplingParams(**defaults)
        except SettingError as error:
            raise SettingError(f"generation_config.json: {error}") from error
        neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
        chosen = {}
        for name in names:
            values = (given[name], getattr(default, name), neutral[name])
            chosen[name] = next(value for value in values if value is not None)
        return ResolvedSampling(
            temperature=float(chosen["temperature"]),
            top_k=min(max(0, int(chosen["top_k"])), MAX_TOP_K),
            top_p=float(chosen["top_p"]),
            min_p=float(chosen["min_p"]),
            repetition_penalty=float(chosen["repetition_penalty"]),
            presence_penalty=float(self.presence_penalty),
            frequency_penalty=float(self.frequency_penalty),
        )


@dataclass(frozen=True)
class ResolvedSampling:
    """How a token is chosen from a row of logits, nothing unset. `top_k` 0, `top_p` 1, `min_p` 0,
    `repetition_penalty` 1 and the other penalties 0 do nothing; `temperature` 0 is greedy."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0


def _checked_bias(bias: Any) -> dict[int, float] | None:
    """A copy with numbers as keys: JSON has them as text."""
    if not bias and bias is not False:
        return None
    if not isinstance(bias, Mapping):
        raise SettingError(f"logit_bias is {bias!r}; expected a dict of token ids to numbers")
    checked = {}
    for key, value in bias.items():
        token = int(key) if isinstance(key, str) and key.isdecimal() else key
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise SettingError(f"logit_bias holds the token {key!r}; expected a token id")
        if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
            raise SettingError(f"logit_bias of token {token} is {value!r}; expected -100 to 100")
        checked[token] = float(value)
    return checked


def _number(params: SamplingParams, name: str, ok: Any, expected: str) -> None:
    value = getattr(params, name)
    if value is None and _may_be_unset(name):
        return
    # numpy's scalars are welcome; booleans and text are not numbers.
    try:
        sound = not isinstance(value, bool | str) and math.isfinite(value) and ok(value)
    except TypeError:
        sound = False
    if not sound:
        raise SettingError(f"{name} is {value!r}; expected {expected}")


def _integer(params: SamplingParams, name: str, ok: Any, expected: str) -> None:
    value = getattr(params, name)
    if value is None and _may_be_unset(name):
        return
    if isinstance(value, bool) or not isinstance(value, int) or not ok(value):
        raise SettingError(f"{name} is {value!r}; expected {expected}")


def _may_be_unset(name: str) -> bool:
    return next(f for f in fields(SamplingParams) if f.name == name).default is None
