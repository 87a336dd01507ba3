"""A folder that appears whole or not at all, also when the process is killed while writing it.

The content goes to a hidden sibling, `.NAME.nybble-tmp-PID-N`, every file is flushed to the disk, and the
sibling takes the folder's place in one step (`renameat2` with RENAME_EXCHANGE). Where the file system lacks
that, it takes two renames, and the previous folder waits in between as `.NAME.nybble-old-PID-N`; `recover`
puts it back if the process died there. Who is alive is told by an advisory lock on the sibling, which the
kernel drops with its process, so neither reused process numbers nor other containers confuse it.
"""

import ctypes
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import OutputError

MARKER = "nybble.json"  # what makes a folder one of ours, which --overwrite may replace

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# How long an open waits for a living process that is between its two renames.
_SWAP_PATIENCE_S = 10.0


def check_output(out: Path, overwrite: bool = False) -> Path:
    """The real path that `out` names, if a folder can be written there. Raises `OutputError` otherwise: it
    exists and `overwrite` is off; it is neither an artifact nor empty; its parent is missing or read-only."""
    try:
        real = Path(os.path.realpath(out))
    except ValueError:
        raise OutputError(f"{str(out)!r}: is not a name that a folder can have") from None
    if not real.name:
        raise OutputError(f"{out}: the root folder cannot be an artifact; name a folder inside it")
    recover(real)
    if not real.parent.is_dir():
        raise OutputError(f"{out}: the folder {real.parent} does not exist; create it first")
    if os.path.lexists(real):
        if not overwrite:
            raise OutputError(f"{out}: exists already; name another folder, or replace it with --overwrite")
        _check_replaceable(real, out)
    if not os.access(real.parent, os.W_OK | os.X_OK):
        raise OutputError(f"{out}: the folder {real.parent} is not writable")
    return real


def check_space(out: Path, needed: int) -> None:
    """Raises `OutputError` if the file system of `out`'s parent has fewer than `needed` bytes free."""
    stats = os.statvfs(out.parent)
    free = stats.f_bavail * stats.f_frsize
    if stats.f_blocks and free < needed:
        raise OutputError(
            f"{out}: the disk is full: {needed / 1e6:.1f} MB are needed and {free / 1e6:.1f} MB are free"
        )


def _remove(folder: Path) -> None:
    import shutil  # brings in compression, which running does not need

    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def new_folder(out: Path, overwrite: bool = False) -> Iterator[Path]:
    """Yields an empty temporary folder; when the block ends without an exception its content is at `out`,
    flushed to the disk. Any exception, Ctrl-C included, removes it and leaves `out` as it was; an `OSError`
    (a full disk among them) is raised again as a one-line `OutputError`."""
    real = check_output(out, overwrite)
    try:
        remove_stale(real)
        temporary, lock = _locked_sibling(real, "tmp")
    except OSError as error:
        raise _output_error(out, error) from error
    try:
        yield temporary
        _sync_tree(temporary)
        check_output(out, overwrite)
        _put_in_place(temporary, real)
    except OSError as error:
        raise _output_error(out, error) from error
    finally:
        # After an exchange this is the previous artifact; after a failure, what was written so far.
        _remove(temporary)
        os.close(lock)


def recover(out: Path) -> None:
    """Puts the previous folder back if a process died between the two renames of a replacement. Cheap and
    silent when there is nothing to do."""
    deadline = time.monotonic() + _SWAP_PATIENCE_S
    while not os.path.lexists(out):
        previous = _siblings(out, "old")
        if not previous:
            return
        lock = _try_lock(previous[0])
        if lock is not None:
            try:
                # Renaming is refused, not repeated, if another process was faster.
                with suppress(OSError):
                    os.rename(previous[0], out)
            finally:
                os.close(lock)
        elif time.monotonic() > deadline:
            raise OutputError(f"{out}: another process is replacing it; try again when it has finished")
        else:
            time.sleep(0.01)


def remove_stale(out: Path) -> None:
    """Removes what dead processes left beside `out`: half-written folders, and previous ones that were
    replaced already."""
    recover(out)
    stale = _siblings(out, "tmp")
    if os.path.lexists(out):
        stale += _siblings(out, "old")
    for path in stale:
        lock = _try_lock(path)
        if lock is not None:
            _remove(path)
            os.close(lock)


def _check_replaceable(real: Path, out: Path) -> None:
    if not real.is_dir():
        raise OutputError(f"{out}: is a file; an artifact is a folder, and only a folder is replaced")
    if not (real / MARKER).is_file() and any(real.iterdir()):
        raise OutputError(
            f"{out}: holds other files and no {MARKER}; only an artifact or an empty folder is replaced"
        )


def _siblings(out: Path, kind: str) -> list[Path]:
    prefix = f".{out.name}.nybble-{kind}-"
    with suppress(OSError):
        return sorted(p for p in out.parent.iterdir() if p.name.startswith(prefix) and p.is_dir())
    return []


def _sibling_name(out: Path, kind: str) -> Path:
    number = 0
    while True:
        path = out.with_name(f".{out.name}.nybble-{kind}-{os.getpid()}-{number}")
        if not os.path.lexists(path):
            return path
        number += 1


def _try_lock(path: Path, without: bool = False) -> int | None:
    """An exclusive lock on the folder, as a descriptor to close; None if it is held or the folder is gone.
    On a file system that has no such locks the answer is None too, or a descriptor `without` one."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES) or not without:
                raise
        if os.path.samestat(os.fstat(descriptor), os.stat(path)):
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None


def _locked_sibling(out: Path, kind: str) -> tuple[Path, int]:
    while True:
        path = _sibling_name(out, kind)
        try:
            path.mkdir()
        except FileExistsError:
            continue
        # A cleaner may have taken it for a dead process's in the moment before it was locked.
        lock = _try_lock(path, without=True)
        if lock is not None:
            return path, lock


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_tree(folder: Path) -> None:
    for parent, _, files in os.walk(folder, topdown=False):
        for name in sorted(files):
            _sync(Path(parent, name))
        _sync(Path(parent))


def _put_in_place(temporary: Path, out: Path) -> None:
    if not os.path.lexists(out):
        os.rename(temporary, out)
    elif not _exchange(temporary, out):
        _swap_in_two_steps(temporary, out)
    _sync(out.parent)


def _exchange(first: Path, second: Path) -> bool:
    """Swaps two paths in one step; False where the C library or the file system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    result = renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
    if result == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(second))


def _swap_in_two_steps(temporary: Path, out: Path) -> None:
    lock = _try_lock(out, without=True)
    if lock is None:
        raise OutputError(f"{out}: another process is replacing it; try again when it has finished")
    try:
        previous = _sibling_name(out, "old")
        os.rename(out, previous)
        try:
            os.rename(temporary, out)
        except BaseException:
            os.rename(previous, out)
            raise
        _sync(out.parent)
        _remove(previous)
    finally:
        os.close(lock)


def _output_error(out: Path, error: OSError) -> OutputError:
    if error.errno in _FULL:
        return OutputError(f"{out}: the disk is full; nothing was left there")
    reason = error.strerror or str(error)
    return OutputError(f"{out}: cannot be written: {reason}")
