from pathlib import Path

import pytest

from nybble.devices import peak_resident_bytes, reset_peak_resident


def test_the_peak_grows_with_what_is_held_and_stays() -> None:
    before = peak_resident_bytes()
    if before is None:
        pytest.skip("this system does not say")
    size = before + 32_000_000
    held = bytearray(size)
    held[::4096] = b"x" * len(held[::4096])
    assert (peak_resident_bytes() or 0) > size
    del held
    assert (peak_resident_bytes() or 0) > size


def test_the_peak_can_begin_again(make_tree) -> None:
    held = bytearray(64_000_000)
    held[::4096] = b"x" * len(held[::4096])
    high = peak_resident_bytes()
    del held
    if not reset_peak_resident():
        pytest.skip("this system does not reset it")
    assert high is not None
    assert (peak_resident_bytes() or 0) < high - 32_000_000
    assert not reset_peak_resident(make_tree({}))


def test_the_kernels_own_figure_is_preferred(make_tree) -> None:
    tree: Path = make_tree({"proc/self/status": "VmPeak:\t 9 kB\nVmHWM:\t   1234 kB\nVmRSS:\t 5 kB\n"})
    assert peak_resident_bytes(tree) == 1234 * 1024
    assert (peak_resident_bytes(make_tree({"proc/self/status": "VmHWM:\n"})) or 0) > 1_000_000
