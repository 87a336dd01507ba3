"""`StepCosts`: what tokens besides one of each answer add to a step's time, as it was measured."""

from itertools import pairwise

# Measurements of a step with more tokens that count alike, and what one weighs after those: as texts grow all
# steps grow alike, so that more of a difference is the plain step's than the ratio's.
_LEARNING, _NEW = 8, 0.03
# What a new measurement weighs for a plain step's time: of one, and of a step with more tokens.
_NEW_PLAIN, _NEW_IMPLIED = 0.25, 0.15
# Longer than this many times what was expected, the machine did something else.
_OUTLIER = 2.0
# Before anything is measured: what a token more adds to a step of one answer.
_SLOPE = 0.12


class StepCosts:
    """Of steps for a number of answers: their seconds with as many tokens as answers, and how many times that
    they take with more. Kernels work in blocks, so that four tokens may take less than three: each number is
    measured for itself, and between those that were, and beyond, a line is drawn."""

    def __init__(self, answers: int) -> None:
        self.plain = 0.0  # seconds of a step without more tokens, as it is now; 0: not seen yet
        self._slope = _SLOPE / (1 + 0.5 * (answers - 1))
        self._ratio: dict[int, float] = {0: 1.0}
        self._seen: dict[int, int] = {}
        self._table: list[float] = []

    def observe(self, more: int, seconds: float) -> None:
        """A step with so many more tokens took that long."""
        if seconds <= 0:
            return
        expected = self.ratios(more)[more] * self.plain if more else self.plain
        if expected == 0.0:  # the first one
            self.plain, expected = seconds / self.ratios(more)[more], seconds
        seconds = min(seconds, _OUTLIER * expected)
        if more == 0:
            self.plain += _NEW_PLAIN * (seconds - self.plain)
            return
        seen = self._seen[more] = self._seen.get(more, 0) + 1
        old = self._ratio.get(more, 1 + self._slope * more)
        weight = 1 / (seen + 1) if seen <= _LEARNING else _NEW
        self._ratio[more] = old + weight * (seconds / self.plain - old)
        if seen > _LEARNING:
            self.plain += _NEW_IMPLIED * (seconds / old - self.plain)
        self._table = []

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
