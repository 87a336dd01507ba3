"""The C++ extension against what Linux says of the same CPU."""

import platform
from pathlib import Path

import pytest

from nybble.devices.cpu import _from_proc, read_cpu

kernels = pytest.importorskip("nybble._kernels")


@pytest.fixture
def linux_cpu():
    if not Path("/proc/cpuinfo").exists():
        pytest.skip("needs Linux's /proc/cpuinfo")
    return _from_proc(Path("/"))


def test_the_extension_lists_the_instruction_sets_that_linux_lists(linux_cpu):
    assert set(kernels.cpu_info()["isa"]) == set(linux_cpu[1])


def test_the_extension_names_the_cpu(linux_cpu):
    brand = kernels.cpu_info()["brand"]
    assert isinstance(brand, str)
    if "x86" in platform.machine():
        assert brand == linux_cpu[0]


def test_the_extension_measures_the_caches_that_linux_measures(linux_cpu):
    if linux_cpu[2] is None:
        pytest.skip("no caches in /sys")
    found = [(c["level"], c["type"], c["bytes"], c["line_bytes"]) for c in kernels.cpu_info()["caches"]]
    assert found == [(c.level, c.type, c.bytes, c.line_bytes) for c in linux_cpu[2]]


def test_reading_the_cpu_uses_the_extension():
    cpu = read_cpu()
    assert cpu.kernels
    assert cpu.isa == tuple(kernels.cpu_info()["isa"])
