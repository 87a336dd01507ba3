"""Which instruction set the kernels use, and what it was measured to do."""

import os
import subprocess
import sys

import pytest

from nybble.devices import choose_isa, kernel_sets, measure_limits
from nybble.errors import SettingError

kernels = pytest.importorskip("nybble._kernels")
SETS = kernels.supported_kernels()

SHOW = """
from nybble.devices import choose_isa, probe
try:
    print(choose_isa(), choose_isa("scalar"))
except ValueError as error:
    print(error)
    print(choose_isa("scalar"))
print(probe(providers=False).kernel_isa)
"""


def with_isa(name: str) -> list[str]:
    environment = os.environ | {"NYBBLE_ISA": name}
    command = [sys.executable, "-c", SHOW]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


@pytest.mark.parametrize("name", ["", *SETS])
def test_the_environment_chooses_unless_an_argument_does(name: str) -> None:
    best = name or SETS[0]
    assert with_isa(name) == [f"{best} scalar", best]


def test_an_unknown_set_in_the_environment_is_one_clear_line() -> None:
    message, explicit, probed = with_isa("avx9000")
    assert "NYBBLE_ISA is 'avx9000'" in message
    assert all(name in message for name in SETS)
    assert explicit == "scalar"
    assert probed == "None"


def test_an_unknown_set_as_an_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NYBBLE_ISA", "scalar")
    with pytest.raises(SettingError, match="isa is 'sse2'") as raised:
        choose_isa("sse2")
    assert "NYBBLE_ISA" not in str(raised.value)


@pytest.mark.parametrize("isa", SETS)
def test_limits_are_measured_for_every_set(isa: str) -> None:
    limits = measure_limits(2, isa)
    assert (limits.threads, limits.isa) == (2, isa)
    assert limits.small_read.rate > 0
    assert limits.large_read.bytes >= limits.small_read.bytes >= 64 << 20
    assert limits.bandwidth.memory <= limits.large_read.rate
    assert limits.integer_rate > 0


def test_the_best_set_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NYBBLE_ISA", raising=False)
    assert kernel_sets() == tuple(SETS)
    assert choose_isa() == SETS[0]


@pytest.mark.parametrize("threads", [0, 2000])
def test_threads_out_of_range(threads: int) -> None:
    with pytest.raises(SettingError, match="threads"):
        measure_limits(threads)


def test_no_more_memory_is_read_than_was_allowed() -> None:
    limits = measure_limits(1, memory=1 << 20)
    # In whole units.
    assert 1 << 20 <= limits.small_read.bytes == limits.large_read.bytes < 1 << 21
    assert limits.bandwidth.cached == 0


def test_measures_refuse_what_they_cannot_do() -> None:
    with pytest.raises(ValueError, match="bytes"):
        kernels.MemoryRead(1, 0)
    with pytest.raises(MemoryError):
        kernels.MemoryRead(1, 1 << 48)
    with pytest.raises(ValueError, match="avx9000"):
        kernels.DotLoop(1, "avx9000")
    with pytest.raises(ValueError, match="rounds"):
        kernels.DotLoop(1, "scalar").run(0)


def test_a_read_is_of_at_least_what_was_asked_for_in_equal_parts() -> None:
    memory = kernels.MemoryRead(3, 1_000_001)
    assert memory.bytes >= 1_000_001
    assert memory.bytes % 3 == 0
    assert memory.run() > 0
