"""The histogram's quantiles against those of the durations themselves."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nybble.runtime.histogram import GROWTH, LatencyHistogram, Quantiles

HALF_A_BUCKET = GROWTH**0.5 * (1 + 1e-9)


@given(
    durations=st.lists(st.floats(2e-6, 9e4), min_size=1, max_size=300),
    share=st.floats(0.001, 1),
)
def test_quantiles_are_within_half_a_bucket_of_the_exact_ones(durations: list[float], share: float) -> None:
    histogram = LatencyHistogram()
    for seconds in durations:
        histogram.add(seconds)
    exact = sorted(durations)[max(1, math.ceil(share * len(durations))) - 1]
    assert exact / HALF_A_BUCKET <= histogram.quantile(share) <= exact * HALF_A_BUCKET


@given(durations=st.lists(st.floats(0, 1e9), max_size=50))
def test_any_duration_is_counted(durations: list[float]) -> None:
    histogram = LatencyHistogram()
    for seconds in durations:
        histogram.add(seconds)
    found = histogram.quantiles()
    assert found.count == len(durations)
    if durations:
        assert found.mean == pytest.approx(sum(durations) / len(durations))
        assert found.longest == max(durations)
        assert 0 <= found.p50 <= found.p90 <= found.p99 <= found.longest


def test_without_durations_there_are_zeros() -> None:
    assert LatencyHistogram().quantiles() == Quantiles()


def test_memory_does_not_grow() -> None:
    histogram = LatencyHistogram()
    buckets = len(histogram._counts)
    for number in range(100_000):
        histogram.add(number * 1e-3)
    assert len(histogram._counts) == buckets
