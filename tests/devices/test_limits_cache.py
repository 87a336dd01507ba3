"""Measured limits are kept for one CPU, quota, instruction set and number of threads, and never trusted."""

import json
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from nybble.devices import MachineLimits, ReadRate, limits_cache, measure_on, measured, probe, resolve_device
from nybble.devices.limits_cache import LimitsKey, load_limits, measure_and_keep
from nybble.errors import DoesNotFitError

KEY = LimitsKey("Some CPU", "x86_64", 4, "avx2", 2)
SMALL, LARGE = 64 << 20, 512 << 20


def limits(
    small: float, large: float, rate: float = 300e9, isa: str = "avx2", threads: int = 2
) -> MachineLimits:
    return MachineLimits(threads, isa, ReadRate(SMALL, small), ReadRate(LARGE, large), rate)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "nybble"


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the measurements give, one after the other, in place of half a second each."""
    bandwidths = [11e9, 12e9, 10e9]

    def measure(threads: int, isa: str, memory: int | None) -> MachineLimits:
        large = bandwidths.pop(0)
        return limits(26e9 - large, large, isa=isa, threads=threads)

    monkeypatch.setattr(limits_cache, "measure_limits", measure)
    return bandwidths


def test_what_was_measured_is_found_again(rates: list[float], cache: Path) -> None:
    assert load_limits(KEY) is None
    assert measure_and_keep(KEY) == load_limits(KEY) == limits(15e9, 11e9)
    # A busy machine measures less, of one buffer or the other, and can do no less.
    assert measure_and_keep(KEY) == load_limits(KEY) == limits(15e9, 12e9)
    assert measure_and_keep(KEY) == load_limits(KEY) == limits(16e9, 12e9)
    assert len(list(cache.iterdir())) == 1


def test_what_was_read_of_buffers_of_another_size_is_forgotten(
    rates: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    measure_and_keep(KEY)
    less = replace(limits(9e9, 9e9, 200e9), large_read=ReadRate(SMALL, 9e9))
    monkeypatch.setattr(limits_cache, "measure_limits", lambda *given: less)
    expected = replace(limits(15e9, 9e9), large_read=ReadRate(SMALL, 9e9))
    assert measure_and_keep(KEY) == load_limits(KEY) == expected


@pytest.mark.parametrize(
    "change", [{"cpu": "Other CPU"}, {"cpu": None}, {"cores": 3}, {"isa": "scalar"}, {"threads": 1}]
)
def test_another_machine_finds_nothing(rates: list[float], change: dict[str, object]) -> None:
    measure_and_keep(KEY)
    other = replace(KEY, **change)  # type: ignore[arg-type]
    assert load_limits(other) is None
    # Not even in a file that was copied to where its own would be.
    assert KEY.file is not None
    assert other.file is not None
    other.file.write_bytes(KEY.file.read_bytes())
    assert load_limits(other) is None


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b"[]",
        b'{"cpu": "Some CPU"}',
        b" " * 70_000,
        lambda data: {**data, "small_read": 11e9},
        lambda data: {**data, "small_read": {"bytes": 0, "rate": 11e9}},
        lambda data: {**data, "small_read": {"bytes": 1 << 26}},
        lambda data: {**data, "large_read": {"bytes": 1 << 29, "rate": True}},
        lambda data: {**data, "large_read": {"bytes": "many", "rate": 11e9}},
        lambda data: {**data, "integer_rate": "fast"},
        lambda data: {**data, "integer_rate": float("inf")},
        lambda data: {**data, "integer_rate": float("nan")},
    ],
)
def test_a_damaged_file_is_ignored_and_replaced(rates: list[float], damage: object) -> None:
    measure_and_keep(KEY)
    assert KEY.file is not None
    if callable(damage):
        damage = json.dumps(damage(json.loads(KEY.file.read_text()))).encode()
    assert isinstance(damage, bytes)
    KEY.file.write_bytes(damage)
    assert load_limits(KEY) is None
    measure_and_keep(KEY)
    assert load_limits(KEY) is not None


def test_a_pipe_in_its_place_is_not_waited_for(cache: Path) -> None:
    cache.mkdir()
    assert KEY.file is not None
    os.mkfifo(KEY.file)
    finder = threading.Thread(target=load_limits, args=(KEY,), daemon=True)
    finder.start()
    finder.join(30)
    assert not finder.is_alive()


def test_a_folder_that_cannot_be_written_costs_nothing_but_the_file(rates: list[float], cache: Path) -> None:
    cache.write_text("a file where the folder would be")
    assert measure_and_keep(KEY) == limits(15e9, 11e9)
    assert load_limits(KEY) is None


def test_without_kernels_a_machine_is_not_measured(make_tree) -> None:
    machine = measured(probe(make_tree({}), providers=False))
    assert machine.limits is None
    assert any(note.startswith("measured limits:") for note in machine.notes)


def test_a_machine_with_little_memory_left_is_not_measured() -> None:
    pytest.importorskip("nybble._kernels")
    machine = replace(probe(providers=False), usable_memory=100_000_000)
    again = measured(machine, again=True)
    assert again.limits == machine.limits
    assert any("measured limits: they take" in note and "100 MB usable" in note for note in again.notes)


def test_no_more_than_half_of_the_usable_memory_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = replace(probe(providers=False), usable_memory=1_000_000_000)
    allowed: list[int | None] = []

    def measure(threads: int, isa: str, memory: int | None) -> MachineLimits:
        allowed.append(memory)
        return limits(11e9, 11e9)

    monkeypatch.setattr(limits_cache, "measure_limits", measure)
    measure_on(machine, KEY)
    measure_on(replace(machine, usable_memory=None), KEY)
    assert allowed == [500_000_000, None]
    with pytest.raises(DoesNotFitError, match="over half of the 100 MB usable"):
        measure_on(replace(machine, usable_memory=100_000_000), KEY)
    assert len(allowed) == 2


def test_auto_takes_the_bandwidth_that_was_kept_and_never_measures(rates: list[float]) -> None:
    pytest.importorskip("nybble._kernels")
    assert probe(providers=False).limits is None
    assert resolve_device("auto").bandwidth is None
    machine = measured(probe(providers=False))
    assert machine.limits is not None
    profile = resolve_device("auto")
    assert profile.bandwidth == machine.limits.bandwidth.memory
    assert profile.bandwidth_at(SMALL) == pytest.approx(15e9, rel=1e-6)
    assert profile.bandwidth_at(LARGE) == pytest.approx(11e9, rel=1e-6)
    assert measured(probe(providers=False)).limits == machine.limits
    again = measured(probe(providers=False), again=True)
    assert again.limits is not None
    assert again.limits.large_read.rate == 12e9
