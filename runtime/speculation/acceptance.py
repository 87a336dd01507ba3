"""`Acceptance`: how often guesses of a kind are right."""

from collections.abc import Sequence

# What a trial weighs against the next of its kind, and how many trials the first belief is worth: a few
# wrong guesses are enough to stop, a few right ones to go on.
_FORGET = 0.94
_BELIEF = 2.0


class Acceptance:
    """The share of right guesses among the latest of each kind, begun with what is believed of it."""

    def __init__(self, beliefs: Sequence[float]) -> None:
        self._right = [_BELIEF * share for share in beliefs]
        self._tried = [_BELIEF] * len(self._right)

    def share(self, kind: int) -> float:
        return self._right[kind] / self._tried[kind]

    def observe(self, kind: int, right: bool) -> None:
        self._tried[kind] = self._tried[kind] * _FORGET + 1
        self._right[kind] = self._right[kind] * _FORGET + right
