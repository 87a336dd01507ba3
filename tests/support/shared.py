"""What is made once for all processes that share the tests, or for all runs of them."""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

KEPT = Path(__file__).parents[2] / "build" / "tests"


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that `make` fills in the process that comes first; the others wait until it has. Where it
    failed, the next tries in another folder."""
    base = factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with open(base / f"{name}.lock", "a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.seek(0)
        if not (made := lock.read()):
            folder = factory.mktemp(name)
            make(folder)
            made = str(folder)
            lock.write(made)
        return Path(made)


def kept(name: str, sources: Iterable[Path], settings: Iterable[str], make: Callable[[Path], None]) -> Path:
    """`build/tests/NAME`, which `make` fills, and which later runs find as long as `sources` have the same
    names and contents and `settings` (how it is made, and with what) are the same."""
    digest = hashlib.sha256(repr(list(settings)).encode())
    for path in sorted(sources):
        content = path.read_bytes()
        digest.update(f"\n{path.name} {len(content)}\n".encode() + content)
    KEPT.mkdir(parents=True, exist_ok=True)
    folder, complete = KEPT / name, KEPT / name / ".complete"
    with open(KEPT / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not complete.exists() or complete.read_text() != digest.hexdigest():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            complete.write_text(digest.hexdigest())
    return folder
