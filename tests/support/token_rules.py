"""`Executor.decode`'s rules, as `sample` follows them."""

import numpy as np
from numpy.typing import NDArray

from nybble.errors import ExecutorError
from nybble.runtime.executor import NONE_LEFT
from nybble.runtime.sampler import Changes, TokenRule, sample


class RuleInPython:
    """A rule on its way through an answer."""

    def __init__(self, rule: TokenRule) -> None:
        self._rule, self._position = rule, rule.position
        self._seen = [] if rule.seen is None else rule.seen.tolist()
        self._times: dict[int, float] = {}
        if rule.changes is not None and rule.changes.counts is not None:
            tokens, times = rule.changes.counts
            self._times = dict(zip(tokens.tolist(), times.tolist(), strict=True))

    def next(self, row: NDArray[np.float32]) -> int:
        """The token after a row [vocab]."""
        rule = self._rule
        counts = np.array(list(self._times), np.int32), np.array([*self._times.values()], np.float32)
        changes = Changes(None if rule.changes is None else rule.changes.bias, counts)
        try:
            token = sample(
                row,
                rule.sampling,
                seed=rule.seed,
                index=rule.index,
                position=self._position,
                seen=np.array(self._seen, np.int32),
                changes=changes,
            )
        except ExecutorError:
            return NONE_LEFT
        self._position += 1
        if token not in self._seen:
            self._seen.append(token)
        self._times[token] = self._times.get(token, 0) + 1
        return token
