"""Writing the ONNX half: a graph for each attention contract, and every weight once, in `weights.bin` beside
them.

A tensor in `weights.bin` begins at a multiple of 4096 bytes, a page, so that ONNX Runtime can map it from the
file instead of reading it; the bytes between are zero.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from .artifact import GENAI_GRAPH, PAGED_GRAPH
from .onnx_builder import join_parts
from .onnx_contract import Contract
from .onnx_dependency import ir
from .onnx_graph import build_decoder
from .weights import LogicalWeights

GRAPHS: dict[Contract, str] = {"paged": Path(PAGED_GRAPH).name, "genai": Path(GENAI_GRAPH).name}
WEIGHTS = "weights.bin"
ALIGNMENT = 4096


def write_onnx(
    weights: LogicalWeights,
    folder: Path,
    *,
    accuracy_level: int = 4,
    contracts: Sequence[Contract] = ("paged",),
) -> list[Path]:
    """Writes the graphs and the weights into `folder`, which is made if need be, and returns their paths, the
    weights' last. Tensors are written as they are asked for: no more than one operator's are held. Neither
    atomic nor synced: the caller is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with (folder / WEIGHTS).open("wb") as file:
        store = _FileStore(file, folder)
        for contract in contracts:
            model = build_decoder(weights, accuracy_level=accuracy_level, store=store, contract=contract)
            paths.append(folder / GRAPHS[contract])
            paths[-1].write_bytes(ir.to_proto(model).SerializeToString())
    return [*paths, folder / WEIGHTS]


class _FileStore:
    """Writes a tensor the first time it is given; a second graph of the same weights refers to that place."""

    def __init__(self, file: BinaryIO, folder: Path) -> None:
        self.file, self.folder = file, folder
        self.written: dict[str, ir.ExternalTensor] = {}

    def add(self, name: str, parts: Sequence[NDArray[Any]]) -> ir.TensorProtocol:
        if name not in self.written:
            self.written[name] = self._write(name, parts)
        return self.written[name]

    def _write(self, name: str, parts: Sequence[NDArray[Any]]) -> ir.ExternalTensor:
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
