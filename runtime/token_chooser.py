"""`TokenChooser`: the tokens of one answer, each from its row of logits."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ..errors import SettingError
from .constraint import Constraint
from .sampler import Changes, Logits, TokenRule, Tokens, sample
from .sampling_params import ResolvedSampling


class TokenChooser:
    """Chooses one answer's tokens and keeps what that needs of those before: which there were, how often, how
    many. `choose` depends on the row, the position and the tokens accepted, and changes nothing.

    `seed` and `index` (of the answer among several to a prompt) are the random numbers' key. `stop_ids` end
    the answer and cannot be chosen before `min_tokens`; where there is a `constraint`, only when the text is
    whole, and before `min_tokens` only when nothing else can follow. Raises `SettingError` for a bias of a
    token that is not in the vocabulary.
    """

    def __init__(
        self,
        sampling: ResolvedSampling,
        *,
        vocab_size: int,
        seed: int,
        index: int = 0,
        prompt_ids: Collection[int] = (),
        stop_ids: Collection[int] = (),
        min_tokens: int = 0,
        logit_bias: Mapping[int, float] | None = None,
        constraint: Constraint | None = None,
    ) -> None:
        if logit_bias and max(logit_bias) >= vocab_size:
            raise SettingError(f"logit_bias holds token {max(logit_bias)}; the model has {vocab_size} tokens")
        self.sampling = sampling
        self._seed, self._index = seed, index
        self._stop_ids = [token for token in stop_ids if token < vocab_size]
        self._banned_for = min_tokens if self._stop_ids else 0  # tokens of the answer
        self._accepted = 0
        self._bias = _bias_arrays(logit_bias) if logit_bias else None
        self._seen = TokenCounts(prompt_ids) if sampling.repetition_penalty != 1.0 else None
        penalized = sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
        self._counts = TokenCounts() if penalized else None
        self._changed = self._bias is not None or penalized
        self._constraint = constraint
        self._plain = not self._changed and self._seen is None and sampling.temperature == 0.0

    @property
    def has_rule(self) -> bool:
        """Whether `rule` says how the next tokens are chosen: no constraint does, and all may be chosen."""
        return self._constraint is None and self._accepted >= self._banned_for

    @property
    def best_only(self) -> bool:
        """Whether of the next rows only the highest logit counts."""
        return self._plain and self.has_rule

    def rule(self, position: int) -> TokenRule:
        """How `choose` and `accept` make the next tokens, from `position` on. Holds views of what is there
        now."""
        seen = None if self._seen is None else self._seen.tokens
        return TokenRule(self.sampling, self._seed, self._index, position, seen, self._changes())

    def choose(self, logits: Logits, position: int, best: int | None = None) -> int:
        """The token at `position` of the sequence, from its row, `logits` [vocab] float32; `best` is where
        that has its highest, if it is known. Raises `ExecutorError` where the row holds no numbers or leaves
        no token."""
        banned = self._stop_ids if self._accepted < self._banned_for else ()
        if self._constraint is None:
            return self._sample(logits, position, banned, best=best)
        if self.sampling.temperature == 0.0:
            # The best of all that is allowed is the best of those allowed: no mask is needed.
            token = self._sample(logits, position, banned, best=best)
            if self._constraint.accepting if token in self._stop_ids else self._constraint.allows(token):
                return token
        return self._sample(logits, position, (), self._allowed(early=bool(banned)))

    @property
    def ended(self) -> bool:
        """Whether the constraint lets nothing follow, and there is no stop token to say so."""
        return self._constraint is not None and not self._stop_ids and self._constraint.complete

    def accept(self, token: int) -> None:
        """Takes the token as the answer's next."""
        self._accepted += 1
        if self._seen is not None:
            self._seen.add(token)
        if self._counts is not None:
            self._counts.add(token)
        if self._constraint is not None and token not in self._stop_ids:
            self._constraint.accept(token)

    def take_back(self, tokens: Sequence[int]) -> None:
        """Undoes `accept` of the last tokens."""
        self._accepted -= len(tokens)
        for counts in (self._seen, self._counts):
            if counts is not None:
                for token in reversed(tokens):
                    counts.remove_last(token)
        if self._constraint is not None:
            self._constraint.take_back(sum(token not in self._stop_ids for token in tokens))

    def stops(self, token: int) -> bool:
        """Whether the token ends the answer."""
        return token in self._stop_ids

    def count_allowed(self, tokens: Sequence[int]) -> int:
        """How many of the tokens, from the first on, the constraint lets follow."""
        return len(tokens) if self._constraint is None else self._constraint.count_allowed(tokens)

    def fork(self, index: int) -> Self:
        """Another answer that goes on from here with random numbers of its own."""
        other = copy(self)
        other._index = index
        other._seen = None if self._seen is None else self._seen.copy()
        other._counts = None if self._counts is None else self._counts.copy()
        other._constraint = None if self._constraint is None else self._constraint.copy()
        return other

    def _sample(
        self,
        logits: Logits,
        position: int,
        banned: Collection[int],
        allowed: NDArray[np.bool_] | None = None,
        best: int | None = None,
    ) -> int:
        return sample(
            logits,
            self.sampling,
            seed=self._seed,
            index=self._index,
            position=position,
            seen=None if self._seen is None else self._seen.tokens,
            banned=banned,
            changes=self._changes(allowed),
            best=best,
        )

    def _changes(self, allowed: NDArray[np.bool_] | None = None) -> Changes | None:
        if not self._changed and allowed is None:
            return None
        counts = None if self._counts is None else (self._counts.tokens, self._counts.times)
        return Changes(self._bias, counts, allowed)

    def _allowed(self, early: bool) -> NDArray[np.bool_]:
        """What the constraint lets follow, the stop tokens among it: [vocab]."""
        assert self._constraint is not None
        allowed = self._constraint.allowed()
        if self._stop_ids:
            allowed = allowed.copy()
            allowed[self._stop_ids] = False
            whole = self._constraint.accepting and (not early or not allowed.any())
            allowed[self._stop_ids] = whole
        return allowed


class TokenCounts:
    """How often each token is there, as arrays that grow by one token at a time."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._place: dict[int, int] = {}
        self._tokens = np.empty(64, np.int32)
        self._times = np.empty(64, np.float32)
        for token in tokens:
            self.add(token)

    @property
    def tokens(self) -> Tokens:
        """Each token once, [n]."""
        return self._tokens[: len(self._place)]

    @property
    def times(self) -> Logits:
        """How often it is there, [n]."""
        return self._times[: len(self._place)]

    def add(self, token: int) -> None:
        place = self._place.get(token)
        if place is not None:
            self._times[place] += 1
            return
        place = self._place[token] = len(self._place)
        if place == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty_like(self._tokens)])
            self._times = np.concatenate([self._times, np.empty_like(self._times)])
        self._tokens[place], self._times[place] = token, 1

    def remove_last(self, token: int) -> None:
        """Undoes the last `add`, which was of this token."""
        place = self._place[token]
        self._times[place] -= 1
        if self._times[place] == 0:
            del self._place[token]

    def copy(self) -> "TokenCounts":
        other = TokenCounts()
        other._place = dict(self._place)
        other._tokens, other._times = self._tokens.copy(), self._times.copy()
        return other


def _bias_arrays(bias: Mapping[int, float]) -> tuple[Tokens, Logits]:
    return np.array(list(bias), np.int32), np.array(list(bias.values()), np.float32)
