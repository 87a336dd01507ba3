"""`StepCosts`: what tokens besides one of each answer add to a step's time, as it was measured."""

from itertools import pairwise

# Steps with more tokens that count alike, and what one weighs after those.
_ALIKE, _NEW = 8, 0.1
# Plain steps that are wanted first, and what one weighs after those: after another, and after a long time.
_PLAIN_FIRST, _NEW_PLAIN, _LATE_PLAIN = 2, 0.25, 0.75
# Longer than this many times what was expected, the machine did something else.
_OUTLIER = 2.0
# Before anything is measured: what a token more adds to a step of one answer.
_SLOPE = 0.12
# As texts grow all steps take longer: after so many with more tokens the plain one is measured again.
_PLAIN_EVERY = 48


class StepCosts:
    """Of steps for a number of answers: their seconds with as many tokens as answers, and how many times that
    they take with more. Kernels work in blocks, so that four tokens may take less than three: each number is
    measured for itself, and between those that were, and beyond, a line is drawn."""

    def __init__(self, answers: int) -> None:
        self.plain = 0.0  # seconds of a step without more tokens, as it is now
        self._plain_seen = 0
        self._since_plain = 0
        self._slope = _SLOPE / (1 + 0.1 * (answers - 1))
        self._ratio: dict[int, float] = {0: 1.0}
        self._seen: dict[int, int] = {}
        self._table: list[float] = []

    @property
    def wants_plain(self) -> bool:
        """Whether the next step should have no more tokens: what more cost can't be told."""
        return self._plain_seen < _PLAIN_FIRST or self._since_plain >= _PLAIN_EVERY

    def observe(self, more: int, seconds: float) -> None:
        """A step with so many more tokens took that long."""
        if seconds <= 0:
            return
        if more == 0:
            self._observe_plain(seconds)
            return
        self._since_plain += 1
        if not self._plain_seen:
            return
        expected = self.ratios(more)[more]
        ratio = min(seconds / self.plain, _OUTLIER * expected)
        seen = self._seen[more] = self._seen.get(more, 0) + 1
        weight = 1 / seen if seen <= _ALIKE else _NEW
        self._ratio[more] = expected + weight * (ratio - expected)
        self._slope += _NEW * ((ratio - 1) / more - self._slope)
        self._table = []

    def _observe_plain(self, seconds: float) -> None:
        if self._plain_seen < _PLAIN_FIRST:
            self.plain = min(self.plain, seconds) if self._plain_seen else seconds
        else:
            weight = _LATE_PLAIN if self._since_plain >= _PLAIN_EVERY else _NEW_PLAIN
            self.plain += weight * (min(seconds, _OUTLIER * self.plain) - self.plain)
        self._plain_seen, self._since_plain = self._plain_seen + 1, 0

    def ratios(self, most: int) -> list[float]:
        """How many times a plain step's time a step with 0 to `most` more tokens takes: [most + 1]."""
        if len(self._table) <= most:
            self._table = self._draw_lines(max(most, 15))
        return self._table

    def _draw_lines(self, most: int) -> list[float]:
        known = sorted(self._ratio.items())
        table: list[float] = []
        for (begin, low), (end, high) in pairwise(known):
            table += [low + (high - low) * i / (end - begin) for i in range(end - begin)]
        last, value = known[-1]
        return table + [value + self._slope * (i - last) for i in range(last, most + 1)]
