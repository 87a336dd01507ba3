"""A file that appears whole or not at all, also when the process is killed while writing it.

The content goes to a hidden sibling, `.NAME.nybble-tmp-PID-N`, is flushed to the disk, and is renamed. What a
killed writer left is removed by the next one: an advisory lock, which the kernel drops with its process,
tells who is alive. Of several writers the last one's file stays.
"""

import fcntl
import glob
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def new_file(file: Path) -> Iterator[BinaryIO]:
    """Yields an empty file to write and read; when the block ends without an exception its content is at
    `file`. Any exception removes it and leaves `file` as it was. Raises `OSError`."""
    _remove_abandoned(file)
    temporary, descriptor = _new_sibling(file)
    try:
        with open(descriptor, "w+b") as output:
            yield output
            output.flush()
            os.fsync(output.fileno())
            os.replace(temporary, file)
            _sync_folder(file.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _new_sibling(file: Path) -> tuple[Path, int]:
    """A new file beside `file`, locked as long as it is open."""
    number = 0
    while True:
        path = file.with_name(f".{file.name}.nybble-tmp-{os.getpid()}-{number}")
        number += 1
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            continue
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Before it was locked, another writer may have taken it for an abandoned one and removed it.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return path, descriptor
        os.close(descriptor)


def _remove_abandoned(file: Path) -> None:
    """Removes what killed writers left beside `file`: their locks went with them."""
    for path in file.parent.glob(f".{glob.escape(file.name)}.nybble-tmp-*"):
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
