"""Loads the sample GGUF files' module, which `make_llamacpp_golden.py` shares with the tests."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="session")
def gguf_samples() -> ModuleType:
    """`gguf_samples.py` beside this file."""
    name = "nybble_tests_gguf_samples"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("gguf_samples.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def smollm2_reader(smollm2_gguf: Path) -> Any:
    """The `gguf` package's view of SmolLM2's file; it takes seconds to make."""
    from gguf import GGUFReader

    return GGUFReader(smollm2_gguf)
