"""The line through two measured rates of reading."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nybble.devices import Bandwidth, ReadRate

SMALL, LARGE = 64 << 20, 512 << 20
rates = st.floats(1e8, 1e12)


@given(small=rates, large=rates)
@example(small=math.nextafter(3e9, 4e9), large=3e9)  # the line's start is lost in rounding
def test_both_measurements_are_found_again(small: float, large: float) -> None:
    found = Bandwidth.between(ReadRate(SMALL, small), ReadRate(LARGE, large))
    assert 0 <= found.cached <= SMALL
    assert found.at(LARGE) == pytest.approx(large)
    if small > large:
        assert found.at(SMALL) == pytest.approx(min(small, 2 * found.memory))
    else:
        assert found == Bandwidth(large)


def test_one_buffer_in_place_of_two_tells_nothing_of_a_cache() -> None:
    assert Bandwidth.between(ReadRate(SMALL, 11e9), ReadRate(SMALL, 10e9)) == Bandwidth(10e9)


@given(size=st.floats(0, 1e12), more=st.floats(1, 100), cached=st.floats(0, 1e9))
def test_more_takes_no_less_time_and_never_less_than_half_of_memorys(
    size: float, more: float, cached: float
) -> None:
    found = Bandwidth(20e9, cached)
    seconds, longer = (n / found.at(n) for n in (size, size * more))
    assert longer >= seconds * (1 - 1e-9)
    assert size / 40e9 <= seconds * (1 + 1e-9) <= size / 20e9 * (1 + 1e-8)
