"""GGUF files to read, by the sample files' module, which `make_llamacpp_golden.py` shares with the tests."""

import importlib.util
import sys
from collections.abc import Callable, Mapping
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


@pytest.fixture
def write(tmp_path: Path, gguf_samples: ModuleType) -> Callable[..., Path]:
    """`write(metadata, tensors, arch="llama")`: a GGUF file."""

    def make(metadata: Mapping[str, Any], tensors: Mapping[str, Any], arch: str = "llama") -> Path:
        path: Path = gguf_samples.write_model(tmp_path / "m.gguf", arch, dict(metadata), dict(tensors))
        return path

    return make
