"""`SamplingParams`: how one request's tokens are chosen and when it ends."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ..errors import SettingError

MAX_SEED = 2**64 - 1


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
    - `logprobs`: how many of the most likely tokens to report for each position, besides the chosen one; the
      log-probabilities are the model's own, before penalty, temperature and filters.

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
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise SettingError(f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}")
        if any(not isinstance(s, str) or not s for s in self.stop_strings):
            raise SettingError(f"stop is {self.stop!r}; expected strings that are not empty")
        ids = self.stop_token_ids
        if isinstance(ids, str | bytes) or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
            raise SettingError(f"stop_token_ids is {ids!r}; expected token ids")
        object.__setattr__(self, "stop_token_ids", tuple(ids))

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
            top_k=max(0, int(chosen["top_k"])),
            top_p=float(chosen["top_p"]),
            min_p=float(chosen["min_p"]),
            repetition_penalty=float(chosen["repetition_penalty"]),
        )


@dataclass(frozen=True)
class ResolvedSampling:
    """How a token is chosen from a row of logits, nothing unset. `top_k` 0, `top_p` 1, `min_p` 0 and
    `repetition_penalty` 1 do nothing; `temperature` 0 is greedy."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def _number(params: SamplingParams, name: str, ok: Any, expected: str) -> None:
    value = getattr(params, name)
    if value is None:
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
    if value is None and next(f for f in fields(params) if f.name == name).default is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not ok(value):
        raise SettingError(f"{name} is {value!r}; expected {expected}")
