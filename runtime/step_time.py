"""`StepTimeModel`: how long a step takes, learned from those that were."""

import math
from collections import deque

from ..records import dataclass

# What a step weighs against the one after it, so that a machine that slows down is noticed.
_FORGET = 0.98
# Durations count as at most this many times what was expected: a step in which the machine did something
# else says little about the next one.
_OUTLIER = 3.0
# Steps kept until the model is asked: most never matter, and noting one has to cost nothing.
_KEPT = 64
# Steps that are learned from together, once there were some.
_BATCH = 8
# Shared steps in which prompts are taken to cost what decodes alone do not.
_FIRST = 16


@dataclass(frozen=True)
class StepShape:
    """What a step computes. Token pairs are what attention costs: for each new token the tokens before it."""

    decodes: int = 0  # sequences whose answer goes on
    decode_context: int = 0  # tokens in the cache of these, together
    prefill_tokens: int = 0
    prefill_pairs: int = 0
    prefills: int = 0  # chunks of prompts
    draft_tokens: int = 0  # besides one token of each decode

    @property
    def sequences(self) -> int:
        """The effective batch."""
        return self.decodes + self.prefills

    @property
    def tokens(self) -> int:
        """New tokens of the step."""
        return self.decodes + self.draft_tokens + self.prefill_tokens


def token_pairs(count: int, past: int) -> int:
    """Token pairs of `count` new tokens after `past`."""
    return count * past + count * (count + 1) // 2


class StepTimeModel:
    """Steps that only decode take `fixed + a * sequences + b * context`; prompts' tokens, and drafts', add
    `c * tokens + d * pairs` to that. Two small least-squares fits, each over the steps that show its part, so
    that a long time without prompts forgets nothing of what they cost."""

    def __init__(self) -> None:
        self._decode = _NonNegativeFit(3, scale=(1.0, 1.0, 1e3))
        self._prefill = _NonNegativeFit(2, scale=(1.0, 1e3))
        self._recent: deque[tuple[StepShape, float]] = deque(maxlen=_KEPT)

    @property
    def knows_prefill(self) -> bool:
        self._learn()
        return self._prefill.count > 0

    def observe(self, shape: StepShape, seconds: float) -> None:
        """A step of this shape took that long."""
        self._recent.append((shape, seconds))

    def decode_seconds(self, decodes: int, context: int) -> float:
        """A step of that many decodes alone; 0 for none, and where none was seen."""
        self._learn()
        return self._decode.predict((1, decodes, context)) if decodes else 0.0

    def prefill_seconds(self, count: int, past: int) -> float:
        """What a chunk of `count` tokens after `past` adds to a step."""
        self._learn()
        return self._prefill.predict((count, token_pairs(count, past)))

    def _learn(self) -> None:
        if len(self._recent) < _BATCH and self._decode.count > _BATCH and self._prefill.count > _BATCH:
            return
        while self._recent:
            shape, seconds = self._recent.popleft()
            if more := shape.prefill_tokens + shape.draft_tokens:
                self._learn_mixed(shape, (more, shape.prefill_pairs), seconds)
            elif shape.decodes:
                self._decode.observe((1, shape.decodes, shape.decode_context), seconds)

    def _learn_mixed(self, shape: StepShape, tokens: tuple[int, int], seconds: float) -> None:
        if shape.decodes:
            if not self._decode.count:
                return  # whose time it was can't be told
            decodes = (1, shape.decodes, shape.decode_context)
            alone = self._decode.predict(decodes)
            if self._prefill.count < _FIRST:
                seconds = max(0.0, seconds - alone)
            else:
                # What a step took longer than expected is laid to both parts: a machine that has become slow
                # does not make a few tokens dear, which would then be fewer still.
                added = self._prefill.predict(tokens)
                total = alone + added
                seconds, whole = seconds * added / total if total else 0.0, seconds
                self._decode.observe(decodes, whole - seconds)
        self._prefill.observe(tokens, seconds)

    def prefill_tokens(self, seconds: float, past: int, most: int) -> int:
        """The most tokens after `past`, up to `most`, that add at most `seconds`."""
        if self.prefill_seconds(most, past) <= seconds:
            return most
        # a n^2 + b n = seconds, written so that a may be 0.
        pair = self._prefill.coefficient(1)
        a, b = pair / 2, self._prefill.coefficient(0) + pair * past + pair / 2
        return min(most, int(2 * seconds / (b + math.sqrt(b * b + 4 * a * seconds))))


class _NonNegativeFit:
    """Least squares with coefficients that are not negative, over observations that are forgotten slowly. A
    little weight pulls coefficients to 0, so that what varies together is told apart in some way."""

    def __init__(self, size: int, scale: tuple[float, ...]) -> None:
        self._scale = scale
        self._squares = [[0.0] * size for _ in range(size)]
        self._products = [0.0] * size
        self._coefficients = [0.0] * size
        self._stale = 0  # observations that these don't know of
        self.count = 0

    def predict(self, features: tuple[int, ...]) -> float:
        if self._stale:
            self._coefficients, self._stale = self._solve(), 0
        return self._apply(features)

    def coefficient(self, index: int) -> float:
        return self._coefficients[index] / self._scale[index]

    def observe(self, features: tuple[int, ...], seconds: float) -> None:
        if self._stale >= min(16, self.count):
            self._coefficients, self._stale = self._solve(), 0
        expected = self._apply(features)
        if self.count >= 4 and expected > 0:
            seconds = min(seconds, _OUTLIER * expected)
        scaled = [feature / scale for feature, scale in zip(features, self._scale, strict=True)]
        # Relative errors count: a short step's say as much as a long one's.
        weight = 1 / sum(scaled) ** 2
        for row, (squares, left) in enumerate(zip(self._squares, scaled, strict=True)):
            for column, right in enumerate(scaled):
                squares[column] = squares[column] * _FORGET + weight * left * right
            self._products[row] = self._products[row] * _FORGET + weight * left * seconds
        self.count += 1
        self._stale += 1

    def _apply(self, features: tuple[int, ...]) -> float:
        scaled = zip(self._coefficients, features, self._scale, strict=True)
        return sum(coefficient * feature / scale for coefficient, feature, scale in scaled)

    def _solve(self) -> list[float]:
        """Drops the most negative coefficient until none is."""
        used = list(range(len(self._products)))
        while used:
            values = self._solve_for(used)
            lowest = min(range(len(used)), key=values.__getitem__)
            if values[lowest] >= 0:
                found = [0.0] * len(self._products)
                for index, value in zip(used, values, strict=True):
                    found[index] = value
                return found
            del used[lowest]
        return [0.0] * len(self._products)

    def _solve_for(self, used: list[int]) -> list[float]:
        """Gauss, with the ridge on the diagonal that keeps it regular."""
        rows = [[self._squares[i][j] for j in used] + [self._products[i]] for i in used]
        ridge = 1e-6 * (sum(row[place] for place, row in enumerate(rows)) + 1e-30)
        for place, row in enumerate(rows):
            row[place] += ridge
        for place, row in enumerate(rows):
            for below in rows[place + 1 :]:
                factor = below[place] / row[place]
                for column in range(place, len(row)):
                    below[column] -= factor * row[column]
        values = [0.0] * len(used)
        for place in reversed(range(len(used))):
            row = rows[place]
            known = sum(row[column] * values[column] for column in range(place + 1, len(used)))
            values[place] = (row[-1] - known) / row[place]
        return values
