from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nybble.devices import format_bytes, parse_bytes, parse_memory_budget
from nybble.errors import SettingError

GB = 10**9


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (600_000_000, 600_000_000),
        ("600MB", 600_000_000),
        ("600 mb", 600_000_000),
        ("1.5GiB", 1_610_612_736),
        ("2GB", 2_000_000_000),
        ("512KiB", 524_288),
        ("1048576", 1_048_576),
        ("1TB", 10**12),
    ],
)
def test_sizes(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text", [0, -5, "", "GB", "-1GB", "1e9", "5 elephants", "0B", None, True, 1.5, "9" * 30, "1" * 99]
)
def test_what_is_no_size(text):
    with pytest.raises(SettingError, match="reserve is"):
        parse_bytes(text, "reserve")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.5, 4 * GB),
        ("0.5", 4 * GB),
        ("25%", 2 * GB),
        (1.0, 8 * GB),
        ("600MB", 600_000_000),
        (3 * GB, 3 * GB),
    ],
)
def test_budgets(value, expected):
    assert parse_memory_budget(value, 8 * GB) == expected


@pytest.mark.parametrize(
    "value", [0.0, 1.5, -0.5, "150%", "0%", float("nan"), float("inf"), "half", 1, "1", None, True, [1]]
)
def test_what_is_no_budget(value):
    with pytest.raises(SettingError, match="memory_budget is"):
        parse_memory_budget(value, 8 * GB)


def test_no_share_can_be_taken_of_an_unknown_amount():
    assert parse_memory_budget("600MB", None) == 600_000_000
    with pytest.raises(SettingError, match="give bytes"):
        parse_memory_budget(0.5, None)


@given(st.text(max_size=50) | st.integers() | st.floats() | st.none())
def test_a_budget_is_a_whole_number_of_bytes_or_an_error(value):
    with suppress(SettingError):
        budget = parse_memory_budget(value, 8 * GB)
        assert isinstance(budget, int)
        assert budget >= 2**20


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (999, "999 B"),
        (1000, "1.00 kB"),
        (102_400_000, "102 MB"),
        (999_600_000, "1.00 GB"),
        (1_449_000_000, "1.45 GB"),
    ],
)
def test_sizes_for_people(size, text):
    assert format_bytes(size) == text
