"""`LatencyHistogram`: quantiles of any number of durations in a fixed amount of memory."""

import math

from ..records import dataclass

# Ratio between a bucket's bounds. A quantile is off by at most half a bucket, 2.5 %.
GROWTH = 1.05
SHORTEST, LONGEST = 1e-6, 1e5  # seconds; what is outside counts as the nearest bucket
_PER_LOG = 1 / math.log(GROWTH)
_OFFSET = -math.log(SHORTEST) * _PER_LOG
_BUCKETS = math.ceil(math.log(LONGEST / SHORTEST) * _PER_LOG) + 1


@dataclass(frozen=True)
class Quantiles:
    """Of durations in seconds; 0 where there were none."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    longest: float = 0.0


class LatencyHistogram:
    """Counts durations, in seconds, in buckets whose bounds grow by `GROWTH`."""

    def __init__(self) -> None:
        self._counts = [0] * _BUCKETS
        self._total, self._sum, self._longest = 0, 0.0, 0.0

    def add(self, seconds: float) -> None:
        place = int(math.log(seconds) * _PER_LOG + _OFFSET) if seconds > SHORTEST else 0
        self._counts[min(place, _BUCKETS - 1)] += 1
        self._total += 1
        self._sum += seconds
        self._longest = max(self._longest, seconds)

    def quantile(self, share: float) -> float:
        """The shortest duration that at least `share` of all do not exceed, within half a bucket; 0 where
        there is none."""
        if not self._total:
            return 0.0
        rank, seen = max(1, math.ceil(share * self._total)), 0
        for place, count in enumerate(self._counts):
            seen += count
            if seen >= rank:
                middle: float = SHORTEST * GROWTH ** (place + 0.5)
                return min(middle, self._longest)
        raise AssertionError("the counts do not add up to their total")

    def quantiles(self) -> Quantiles:
        if not self._total:
            return Quantiles()
        p50, p90, p99 = (self.quantile(share) for share in (0.5, 0.9, 0.99))
        return Quantiles(self._total, self._sum / self._total, p50, p90, p99, self._longest)
