"""What tests of the kernels share."""

import shutil
from pathlib import Path

import pytest
from sanitized import build_sanitized
from shared import made_once


@pytest.fixture(scope="session")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the extension under sanitizers: for its own test, and for that of what it is made of."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    return made_once(tmp_path_factory, "sanitized", build_sanitized)
