from dataclasses import replace

import pytest

from nybble.devices import load_profile, probe, resolve_device
from nybble.devices.resolve import auto_profile

GIB = 2**30


@pytest.fixture
def machine():
    """A machine with two cores and 6 of 16 GiB free."""
    return replace(
        probe(providers=False),
        usable_cores=2,
        memory_total=16 * GIB,
        memory_available=6 * GIB,
        memory_limit=None,
        usable_memory=6 * GIB,
    )


def test_a_profile_never_asks_for_more_than_the_machine_has(machine):
    small = replace(machine, usable_memory=2 * GIB, memory_limit=3 * GIB)
    profile = resolve_device("raspberry-pi-5", small)
    assert profile.threads == 2
    assert profile.memory_budget == 2 * GIB
    assert profile.memory_bytes == 3 * GIB


def test_a_profile_is_a_limit_on_a_larger_machine(machine):
    large = replace(machine, usable_cores=64, memory_total=512 * GIB, usable_memory=500 * GIB)
    assert resolve_device("raspberry-pi-5", large) == load_profile("raspberry-pi-5")


def test_memory_of_a_gpu_is_not_the_hosts(machine):
    small = replace(machine, memory_total=2 * GIB, usable_memory=1 * GIB)
    profile = resolve_device("gpu-8gb", small)
    assert profile.memory_bytes == 8 * GIB
    assert profile.memory_budget == load_profile("gpu-8gb").memory_budget


def test_memory_that_cannot_be_read_narrows_nothing(machine):
    blind = replace(machine, memory_total=None, memory_available=None, usable_memory=None)
    assert resolve_device("raspberry-pi-5", blind).memory_budget == 6 * GIB
    assert resolve_device("auto", blind).memory_budget is None


def test_auto_takes_the_cores_and_leaves_memory_for_others(machine):
    profile = auto_profile(machine, cuda=lambda: False)
    assert profile.threads == 2
    assert profile.memory_budget is not None
    assert 0 < profile.memory_budget < 6 * GIB
    assert profile.provider_list == [("CPUExecutionProvider", {})]
    assert profile.page_size == 16


def test_auto_prefers_cuda_where_it_can_run(machine):
    profile = auto_profile(machine, cuda=lambda: True)
    assert [p.name for p in profile.providers] == ["CUDAExecutionProvider", "CPUExecutionProvider"]
    assert profile.page_size == 256
    assert profile.kv_dtype == "f16"
