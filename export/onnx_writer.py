"""Writing the ONNX half: `decoder.onnx`, and every weight in `weights.bin` beside it.

A tensor in `weights.bin` begins at a multiple of 4096 bytes, a page, so that ONNX Runtime can map it from the
file instead of reading it; the bytes between are zero.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from .onnx_builder import join_parts
from .onnx_dependency import ir
from .onnx_graph import build_decoder
from .weights import LogicalWeights

DECODER = "decoder.onnx"
WEIGHTS = "weights.bin"
ALIGNMENT = 4096


def write_onnx(weights: LogicalWeights, folder: Path, *, accuracy_level: int = 4) -> list[Path]:
    """Writes both files into `folder`, which is made if need be, and returns their paths. Tensors are written
    as they are asked for: no more than one operator's are held. Neither atomic nor synced: the caller is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / WEIGHTS).open("wb") as file:
        model = build_decoder(weights, accuracy_level=accuracy_level, store=_FileStore(file, folder))
    (folder / DECODER).write_bytes(ir.to_proto(model).SerializeToString())
    return [folder / DECODER, folder / WEIGHTS]


class _FileStore:
    def __init__(self, file: BinaryIO, folder: Path) -> None:
        self.file, self.folder = file, folder

    def add(self, name: str, parts: Sequence[NDArray[Any]]) -> ir.TensorProtocol:
        offset = -(-self.file.tell() // ALIGNMENT) * ALIGNMENT
        self.file.write(bytes(offset - self.file.tell()))
        for part in parts:
            little = np.ascontiguousarray(part, part.dtype.newbyteorder("<"))
            self.file.write(little.data)
        return external_tensor(name, parts, WEIGHTS, offset, self.folder)


class MemoryTensors:
    """A store that keeps the tensors outside the graph, by name in `arrays`, for a session to take."""

    def __init__(self) -> None:
        self.arrays: dict[str, NDArray[Any]] = {}
        self._end = 0

    def add(self, name: str, parts: Sequence[NDArray[Any]]) -> ir.TensorProtocol:
        self.arrays[name] = join_parts(parts)
        # A place of its own each, though nothing is read there.
        tensor = external_tensor(name, parts, WEIGHTS, self._end)
        self._end += tensor.length or 0
        return tensor


def external_tensor(
    name: str, parts: Sequence[NDArray[Any]], location: str, offset: int, folder: Path | str = ""
) -> ir.ExternalTensor:
    """A reference to the parts stacked along axis 0, held outside the model."""
    shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
    return ir.ExternalTensor(
        location,
        offset,
        sum(part.nbytes for part in parts),
        ir.DataType.from_numpy(parts[0].dtype),
        shape=ir.Shape(shape),
        name=name,
        base_dir=folder,
    )
