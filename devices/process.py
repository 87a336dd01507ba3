"""What this process has used so far, and giving back what it does not use any more."""

import ctypes
import sys
from contextlib import suppress
from pathlib import Path


def give_back_memory() -> None:
    """Returns to the system what this process holds and does not use: freed heap, which the C library else
    keeps for later (after a tokenizer was built some 15 to 30 MB), and pages of libraries' code that imports
    used or that came with those (10 to 20 MB). What a system has no way for is left out."""
    with suppress(ImportError):
        from .. import _kernels

        _kernels.drop_code_pages()
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # musl, macOS; Windows
        return
    trim(ctypes.c_size_t(0))


def reset_peak_resident(root: Path = Path("/")) -> bool:
    """Makes `peak_resident_bytes` begin again from what is resident now; False where no system does."""
    try:
        # https://docs.kernel.org/filesystems/proc.html: 5 resets the peak resident set size.
        (root / "proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def resident_bytes(root: Path = Path("/")) -> int | None:
    """Memory that this process has resident now, in bytes; None where no system says."""
    return _status_bytes(root, "VmRSS")


def peak_resident_bytes(root: Path = Path("/")) -> int | None:
    """The most memory that this process has had resident at once, in bytes, since it began or
    `reset_peak_resident`; None where no system says."""
    if (found := _status_bytes(root, "VmHWM")) is not None:
        return found
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024)


def _status_bytes(root: Path, name: str) -> int | None:
    try:
        status = (root / "proc/self/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    for line in status.splitlines():
        key, _, value = line.partition(":")
        if key == name and value.split()[:1] and value.split()[0].isdigit():
            return int(value.split()[0]) * 1024
    return None
