"""What is made once for all processes that share the tests."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


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
