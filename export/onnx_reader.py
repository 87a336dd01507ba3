"""Reading the ONNX half back: the graph, checked against its files, and its logical tensors.

Nothing in `decoder.onnx` is believed: every tensor outside it must lie inside a file of the same folder, in a
range of exactly its size, before anything is allocated or given to ONNX Runtime.
"""

import json
import math
import stat
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelFormatError
from ..models.spec import ModelSpec
from ..quant.packing import QuantizedTensor, from_matmulnbits, matmulnbits_block, unpack_rows
from ..quant.packing_bnb import from_bnb_nf4
from ..quant.packing_nf4 import Nf4Tensor
from ..quant.packing_rows import MatrixKind, MatrixRows, all_in_the_middle
from ..records import dataclass
from .onnx_contract import CONTRACTS, Contract
from .onnx_dependency import ir
from .onnx_graph import FORMAT_VERSION
from .onnx_linear import NF4_TYPE, StoredTensor
from .onnx_spec import spec_from_json
from .weights import LogicalTensor

MAX_GRAPH_BYTES = 256 << 20  # a graph has no weights in it; one of 200 layers takes a few MiB


@dataclass(frozen=True, eq=False)
class DecoderFile:
    """An opened graph, and what its metadata says."""

    path: Path
    model: ir.Model
    contract: Contract
    spec: ModelSpec
    tensors: dict[str, StoredTensor]
    weight_bytes: int  # of all tensors outside the graph

    def places(self) -> dict[str, tuple[Any, ...]]:
        """Each initializer outside the graph: file, first byte, bytes, dtype and shape."""
        tensors = ((name, value.const_value) for name, value in self.model.graph.initializers.items())
        return {
            name: (t.location, t.offset, t.length, t.dtype.name, tuple(t.shape.numpy()))
            for name, t in tensors
            if isinstance(t, ir.ExternalTensor)
        }


def open_decoder(path: Path) -> DecoderFile:
    """Reads and checks the graph at `path`; of its weights only their place and size. Raises
    `ModelFormatError`."""
    model = _load(path)
    graph = model.graph
    version = model.metadata_props.get("nybble.format")
    if version is None or not version.isdecimal() or len(version) > 9:
        raise ModelFormatError(f"{path.name}: not written by nybble: its metadata has no nybble.format")
    if int(version) > FORMAT_VERSION:
        raise ModelFormatError(
            f"{path.name}: format version {version}; this nybble reads up to {FORMAT_VERSION}: update it"
        )
    contract = model.metadata_props.get("nybble.contract", "paged")
    if contract not in CONTRACTS:
        raise ModelFormatError(
            f"{path.name}: nybble.contract is {contract!r}; expected {' or '.join(CONTRACTS)}"
        )
    _refuse_hidden_tensors(path, model)
    _check_nf4(path, model)
    sizes: dict[str, int] = {}
    weight_bytes = 0
    for value in graph.initializers.values():
        tensor = value.const_value
        if tensor is None:
            raise ModelFormatError(f"{path.name}: initializer {value.name} has no data")
        if isinstance(tensor, ir.ExternalTensor):
            weight_bytes += _check_external(path, tensor, sizes)
    spec = spec_from_json(model.metadata_props.get("nybble.spec", ""), path.name)
    tensors = _layout(path, model.metadata_props.get("nybble.tensors", ""))
    mixture = spec.mixture
    matrices = spec.num_layers + (0 if mixture is None else 3 * len(mixture.layers) * mixture.num_experts)
    if matrices > len(tensors):  # before anything walks them
        raise ModelFormatError(
            f"{path.name}: {spec.num_layers} layers, but {len(tensors)} tensors: some are missing"
        )
    return DecoderFile(path, model, CONTRACTS[CONTRACTS.index(contract)], spec, tensors, weight_bytes)


class OnnxWeights:
    """The `LogicalWeights` of a graph, of either contract, and its `weights.bin`: exactly the tensors that
    were written.

    Each is read from the file when asked for and not kept. Raises `ModelFormatError` for a tensor that is
    missing or whose parts do not fit together.
    """

    def __init__(self, path: Path) -> None:
        self._file = open_decoder(path)
        self._name = path.name
        self._shapes = self.spec.tensors()
        for name, shape in self._shapes.items():
            stored = self._file.tensors.get(name)
            if stored is None and name not in self.spec.float_names:
                raise ModelFormatError(f"{self._name}: tensor {name} is missing")
            if stored is not None and (stored.rows, stored.columns) != shape:
                found = [stored.rows, stored.columns]
                raise ModelFormatError(f"{self._name}: {name} has shape {found}; expected {list(shape)}")
        self._biases = {
            layer.bias_name: layer
            for i in range(self.spec.num_layers)
            for layer in self.spec.linears(i)
            if layer.bias
        }
        self._check_operators()

    @property
    def spec(self) -> ModelSpec:
        return self._file.spec

    def tensor(self, name: str) -> LogicalTensor:
        if (matrix := self.matrix(name)) is not None:
            return matrix.whole()
        stored = self._file.tensors.get(name)
        if stored is None:
            return self._vector(name)
        return self._read(stored.stored + ".weight", np.float32, stored.columns, stored)

    def matrix(self, name: str) -> MatrixRows | None:
        """Raises as `tensor` does, and so do its parts."""
        stored = self._file.tensors.get(name)
        if stored is None or stored.bits is None or stored.group_size is None:
            return None
        if stored.stored + ".absmax" in self._initializers:
            return self._nf4(name, stored, stored.group_size)
        bits, columns, group_size = stored.bits, stored.columns, stored.group_size
        blocks = -(-columns // (block := matmulnbits_block(group_size, columns)))
        permutation = self._permutation(stored)

        def zero_points(part: StoredTensor) -> NDArray[np.uint8] | None:
            if part.stored + ".zero_points" not in self._initializers:
                return None
            return self._read(part.stored + ".zero_points", np.uint8, -(-blocks * bits // 8), part)

        def read(begin: int, end: int) -> QuantizedTensor:
            part = replace(stored, row=stored.row + begin, rows=end - begin)
            b = self._read(part.stored + ".qweight", np.uint8, blocks * block * bits // 8, part)
            return from_matmulnbits(
                b.reshape(part.rows, blocks, -1),
                self._read(part.stored + ".scales", np.float32, blocks, part),
                zero_points(part),
                bits=bits,
                in_features=columns,
                group_size=group_size,
                permutation=permutation,
                name=name,
            )

        zeros = zero_points(stored)
        middle = zeros is None or all_in_the_middle(unpack_rows(zeros, bits, blocks), bits)
        kind: MatrixKind = "symmetric" if middle else "zeros"
        return MatrixRows(stored.rows, columns, bits, group_size, kind, permutation, read)

    def _nf4(self, name: str, stored: StoredTensor, blocksize: int) -> MatrixRows:
        columns = stored.columns
        if columns % blocksize:
            raise ModelFormatError(
                f"{self._name}: {name} has blocks of {blocksize} in rows of {columns}; expected whole blocks"
            )

        def read(begin: int, end: int) -> Nf4Tensor:
            part = replace(stored, row=stored.row + begin, rows=end - begin)
            packed = self._read(part.stored + ".qweight", np.uint8, columns // 2, part)
            absmax = self._read(part.stored + ".absmax", np.float32, columns // blocksize, part)
            return from_bnb_nf4(packed, absmax.reshape(-1), columns, blocksize, f"{self._name}: {name}")

        return MatrixRows(stored.rows, columns, 4, blocksize, "nf4", None, read)

    @property
    def _initializers(self) -> Any:
        return self._file.model.graph.initializers

    def _vector(self, name: str) -> NDArray[np.float32]:
        """A norm, a gate, or a bias: rows of its stored linear's."""
        shape = self._shapes.get(name)
        if shape is None:
            raise ModelFormatError(f"{self._name}: the model has no tensor {name}")
        layer = self._biases.get(name)
        if layer is None:
            width = math.prod(shape[1:])
            return self._read(name, np.float32, width, StoredTensor(name, 0, shape[0], width)).reshape(shape)
        stored = self._file.tensors[layer.name]
        return self._read(stored.stored + ".bias", np.float32, 1, stored)[:, 0]

    def _permutation(self, stored: StoredTensor) -> NDArray[np.int32] | None:
        name = stored.stored + ".permutation"
        if name not in self._initializers:
            return None
        whole = StoredTensor(name, 0, stored.columns, 1)
        order = self._read(name, np.int32, 1, whole)[:, 0]
        if not np.array_equal(np.sort(order), np.arange(stored.columns)):
            raise ModelFormatError(f"{self._name}: {name} is no permutation of {stored.columns} columns")
        return order

    def _read(self, name: str, dtype: Any, width: int, part: StoredTensor) -> NDArray[Any]:
        """Rows of one initializer as [rows, width]: only those are read from the file."""
        value = self._initializers.get(name)
        tensor = None if value is None else value.const_value
        if not isinstance(tensor, ir.ExternalTensor):
            raise ModelFormatError(f"{self._name}: initializer {name} is missing")
        shape = tensor.shape.numpy()
        rows = shape[0] if shape else 0
        found, size = f"{tensor.dtype} {list(shape)}", math.prod(shape)
        if tensor.dtype != ir.DataType.from_numpy(np.dtype(dtype)) or size != rows * width:
            raise ModelFormatError(
                f"{self._name}: {name} is {found}; expected {np.dtype(dtype)} rows of {width}"
            )
        if part.row + part.rows > rows:
            raise ModelFormatError(
                f"{self._name}: {name} has {rows} rows; expected at least {part.row + part.rows}"
            )
        item = np.dtype(dtype).itemsize
        start = (tensor.offset or 0) + part.row * width * item
        data = np.fromfile(
            self._file.path.parent / tensor.location,
            np.dtype(dtype).newbyteorder("<"),
            part.rows * width,
            "",
            start,
        )
        if data.size != part.rows * width:
            raise ModelFormatError(f"{tensor.location}: ends inside {name}")
        if dtype is np.float32 and not np.isfinite(data).all():
            raise ModelFormatError(f"{tensor.location}: {name} holds a value that is not finite")
        return data.reshape(part.rows, width)

    def _check_operators(self) -> None:
        """The graph multiplies with the same bits and blocks that the metadata names."""
        expected: dict[str, tuple[int, ...]] = {}
        for stored in self._file.tensors.values():
            if stored.bits is not None and stored.group_size is not None:
                block = matmulnbits_block(stored.group_size, stored.columns)
                expected[stored.stored + ".scales"] = (stored.bits, block, stored.columns)
                expected[stored.stored + ".absmax"] = (NF4_TYPE, stored.group_size, stored.columns)
        attributes = {
            "MatMulNBits": ("bits", "block_size", "K"),
            "MatMulBnb4": ("quant_type", "block_size", "K"),
        }
        for node in self._file.model.graph:
            if node.op_type not in attributes:
                continue
            scales = node.inputs[2].name if len(node.inputs) > 2 and node.inputs[2] is not None else ""
            found = tuple(_integer(node, key) for key in attributes[node.op_type])
            if expected.get(scales or "") != found:
                *names, last = attributes[node.op_type]
                raise ModelFormatError(
                    f"{self._name}: {node.op_type} with {scales} has {', '.join(names)} and {last} {found}; "
                    f"expected {expected.get(scales or '')}"
                )


def _load(path: Path) -> ir.Model:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise ModelFormatError(f"{path}: cannot be read: {error.strerror}") from None
    if size > MAX_GRAPH_BYTES:
        raise ModelFormatError(f"{path.name}: has {size} bytes; a graph has at most {MAX_GRAPH_BYTES}")
    try:
        return ir.load(path)
    except Exception as error:  # protobuf and onnx-ir raise types of their own for what is no ONNX model
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelFormatError(f"{path.name}: not a sound ONNX model: {reason}") from None


def _refuse_hidden_tensors(path: Path, model: ir.Model) -> None:
    """External data may only be initializers, where `_check_external` sees them."""
    graphs: list[Any] = [model.graph, *model.functions.values()]
    for graph in graphs:
        for node in graph.all_nodes():
            for attribute in node.attributes.values():
                if attribute.is_ref():
                    continue
                if attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
                    raise ModelFormatError(f"{path.name}: node {node.name} has a subgraph; expected none")
                tensors = [attribute.value] if attribute.type == ir.AttributeType.TENSOR else []
                if attribute.type == ir.AttributeType.TENSORS:
                    tensors = list(attribute.value)
                if any(isinstance(tensor, ir.ExternalTensor) for tensor in tensors):
                    raise ModelFormatError(f"{path.name}: node {node.name} refers to data outside the graph")


def _check_nf4(path: Path, model: ir.Model) -> None:
    """ONNX Runtime reads what `MatMulBnb4`'s attributes say, whatever the sizes of its inputs."""
    for function in model.functions.values():
        if any(node.op_type == "MatMulBnb4" for node in function):
            raise ModelFormatError(f"{path.name}: a function has MatMulBnb4; expected it in the graph only")
    for node in model.graph:
        if node.op_type != "MatMulBnb4":
            continue
        sizes = [_integer(node, key) for key in ("K", "N", "block_size")]
        k, n, block = sizes
        # Whole blocks of a power of two, in a row that bytes hold whole.
        sound = min(sizes) > 0 and block >= 16 and block & (block - 1) == 0 and k % block == 0
        found = [
            None if value is None or not isinstance(value.const_value, ir.ExternalTensor)
            else (value.const_value.dtype, tuple(value.const_value.shape.numpy()))
            for value in node.inputs[1:3]
        ]  # fmt: skip
        expected = [(ir.DataType.UINT8, (n, k // 2)), (ir.DataType.FLOAT, (n, k // max(1, block)))]
        kind = _integer(node, "quant_type"), _integer(node, "transB", 1)
        if not sound or kind != (NF4_TYPE, 1) or found != expected or len(node.inputs) != 3:
            raise ModelFormatError(
                f"{path.name}: MatMulBnb4 with K, N and block_size {sizes}, quant_type and transB {kind} has "
                f"{found}; expected NF4 in whole blocks, {expected}"
            )


def _integer(node: ir.Node, key: str, default: int = 0) -> int:
    """An attribute; 0, which none may be, where it is no integer."""
    attribute = node.attributes.get(key)
    if attribute is None:
        return default
    return attribute.as_int() if attribute.type == ir.AttributeType.INT and not attribute.is_ref() else 0


def _check_external(path: Path, tensor: ir.ExternalTensor, sizes: dict[str, int]) -> int:
    """Bytes of one external tensor, which lies in a plain file beside the graph and within it."""
    location, name = str(tensor.location), tensor.name
    if location in ("", ".", "..") or any(c in location for c in "/\\\0:"):
        raise ModelFormatError(
            f"{path.name}: {name} lies in {location!r}; expected a file of the same folder"
        )
    if location not in sizes:
        try:
            status = (path.parent / location).stat()  # in the Hugging Face cache files are links
        except (OSError, ValueError) as error:  # the latter for a name that no file can have
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise ModelFormatError(f"{location[:60]!r}: {reason}; {path.name} needs it") from None
        if not stat.S_ISREG(status.st_mode):
            raise ModelFormatError(f"{location}: not a plain file; {path.name} needs it")
        sizes[location] = status.st_size
    offset, length, dims = tensor.offset or 0, tensor.length, tensor.shape.numpy()
    try:
        expected = math.prod(dims) * tensor.dtype.bitwidth // 8
    except TypeError:
        raise ModelFormatError(f"{path.name}: {name} is {tensor.dtype}; expected numbers") from None
    if min(dims, default=0) < 0 or length != expected:
        raise ModelFormatError(
            f"{path.name}: {name} has {length} bytes; expected {expected} for {list(dims)}"
        )
    if offset < 0 or offset + length > sizes[location]:
        raise ModelFormatError(
            f"{location}: {name} ends at {offset + length}, past the file's {sizes[location]} bytes"
        )
    return int(length)


def _layout(path: Path, text: str) -> dict[str, StoredTensor]:
    """The metadata's table of stored tensors."""
    names = {field.name for field in fields(StoredTensor)}
    try:
        data = json.loads(text)
        tensors = {}
        for name, entry in data.items():
            if set(entry) != names:
                raise ValueError(f"{name} has fields {sorted(entry)}")
            stored = StoredTensor(**entry)
            counts = (stored.row, stored.rows, stored.columns)
            quantized = (stored.bits, stored.group_size)
            if not isinstance(stored.stored, str) or any(type(n) is not int or n < 0 for n in counts):
                raise ValueError(f"{name} has rows {counts}")
            if quantized != (None, None) and (
                stored.bits not in (4, 8) or type(stored.group_size) is not int or stored.group_size < 1
            ):
                raise ValueError(f"{name} has bits and group size {quantized}")
            tensors[str(name)] = stored
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ModelFormatError(f"{path.name}: nybble.tensors cannot be read: {error}") from None
    return tensors
