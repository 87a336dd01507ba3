"""How fast the disk under a file can be read, the page cache left out as far as the system allows."""

import errno
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import SettingError
from ..records import dataclass

BLOCK = 4 << 20  # bytes of a read: as large as a layer, of which there are few in flight
_SMALLEST_FILE = 8 * BLOCK  # less is read too soon to be timed
_SECONDS = 0.5
_MOST_BYTES = 1 << 30


@dataclass(frozen=True)
class DiskRate:
    """A measurement: one reader, in blocks of 4 MiB, one after the other."""

    path: str  # what was asked about
    bytes_per_second: float
    bytes_read: int
    direct: bool  # past the page cache; else its pages were only asked to be dropped, and may have been read


def disk_read_rate(path: str | Path, *, seconds: float = _SECONDS) -> DiskRate:
    """Reads the largest file in a folder, or a file, for so many seconds. Nothing is written but where no
    file has 32 MiB: then one of that size, which is removed. Raises `SettingError` naming the path."""
    try:
        with _large_file(Path(path)) as file:
            return _rate(str(path), file, seconds)
    except OSError as error:
        raise SettingError(
            f"disk read rate of {path}: can't be measured: {error.strerror or error}"
        ) from None


@contextmanager
def _large_file(path: Path) -> Iterator[Path]:
    """A file on the path's file system, large enough to time."""
    path.stat()  # which says so where there is nothing
    found = [path] if path.is_file() else [entry for entry in path.rglob("*") if entry.is_file()]
    largest = max(found, key=lambda entry: entry.stat().st_size, default=None)
    if largest is not None and largest.stat().st_size >= _SMALLEST_FILE:
        yield largest
        return
    import tempfile  # brings in much that running does not need

    folder = path if path.is_dir() else path.parent
    with tempfile.NamedTemporaryFile(prefix=".nybble-tmp-", dir=folder) as output:
        block = os.urandom(BLOCK)  # a disk may compress, or leave out zeros
        for _ in range(_SMALLEST_FILE // BLOCK):
            output.write(block)
        output.flush()
        os.fsync(output.fileno())  # a page that is not on the disk yet cannot be dropped
        yield Path(output.name)


def _rate(path: str, file: Path, seconds: float) -> DiskRate:
    direct = getattr(os, "O_DIRECT", 0)
    if direct:
        try:
            return _read(path, file, direct, seconds)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # what a file system without it says
                raise
    return _read(path, file, 0, seconds)


def _read(path: str, file: Path, direct: int, seconds: float) -> DiskRate:
    descriptor = os.open(file, os.O_RDONLY | direct)
    # A mapping is aligned to a page, as O_DIRECT asks of a buffer.
    with open(descriptor, "rb", buffering=0) as opened, mmap.mmap(-1, BLOCK) as buffer:
        blocks = os.fstat(descriptor).st_size // BLOCK
        count, begin = 0, time.perf_counter()
        while count == 0 or (count * BLOCK < _MOST_BYTES and time.perf_counter() - begin < seconds):
            if count % blocks == 0:
                opened.seek(0)
                if not direct:
                    _drop_pages(descriptor)
            if opened.readinto(buffer) != BLOCK:
                raise OSError(errno.EIO, "a read was cut short")
            count += 1
        taken = time.perf_counter() - begin
    return DiskRate(path, count * BLOCK / taken, count * BLOCK, bool(direct))


def _drop_pages(descriptor: int) -> None:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
