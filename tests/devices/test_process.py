import sys
from pathlib import Path

import pytest

from nybble.devices import give_back_memory, peak_resident_bytes, reset_peak_resident, resident_bytes


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


def test_code_that_was_not_used_since_is_not_resident() -> None:
    """What other tests imported, torch among it, is used by none of this process's threads now."""
    _kernels = pytest.importorskip("nybble._kernels")
    if sys.platform != "linux":
        pytest.skip("this system does not drop pages")
    import numpy as np

    give_back_memory()
    before = resident_bytes()
    a = np.arange(64 * 64, dtype=np.float64).reshape(64, 64)
    np.linalg.svd(a)  # numpy's code is used again, and it works
    after = resident_bytes()
    assert before is not None
    assert after is not None
    assert after > before
    assert _kernels.drop_code_pages() > 100_000
    assert (resident_bytes() or 0) < after
    assert np.array_equal(a @ np.eye(64), a)
