"""A small model as ONNX, and `OrtExecutor` running it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from ort_steps import BLOCKS, PAGE, make_weights

from nybble.export.onnx_writer import write_onnx
from nybble.runtime.ort_executor import OrtExecutor


@pytest.fixture(scope="module")
def onnx_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_onnx(make_weights(), tmp_path_factory.mktemp("onnx"))[0]


@pytest.fixture(scope="module")
def shared(onnx_path: Path) -> Iterator[OrtExecutor]:
    with OrtExecutor.from_file(onnx_path, threads=1, accuracy_level=0) as executor:
        yield executor


@pytest.fixture
def executor(shared: OrtExecutor) -> OrtExecutor:
    """With float32 activations, and an empty cache of 24 pages of 4 tokens."""
    shared.allocate_kv(BLOCKS, PAGE, "f32")
    return shared
