"""A thin layer over onnx-ir for writing graphs and function bodies one operator at a time."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .onnx_dependency import ir

OPSET = 23  # the first with Attention, RMSNormalization and RotaryEmbedding
MICROSOFT = "com.microsoft"
NYBBLE = "ai.nybble"
OPSET_IMPORTS = {"": OPSET, MICROSOFT: 1}
IR_VERSION = 10


class TensorStore(Protocol):
    """Where a graph's weights go. They are handed over one at a time and not kept by the graph's builder."""

    def add(self, name: str, parts: Sequence[NDArray[Any]]) -> ir.TensorProtocol:
        """Takes one tensor, given as parts stacked along axis 0, and returns what the graph refers to."""
        ...


class MemoryStore:
    """Keeps every tensor inside the model: for small graphs and tests."""

    def add(self, name: str, parts: Sequence[NDArray[Any]]) -> ir.TensorProtocol:
        return ir.tensor(join_parts(parts), name=name)


def join_parts(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """The parts as one C-contiguous array; no copy when there is one that is so already."""
    return np.ascontiguousarray(parts[0] if len(parts) == 1 else np.concatenate(parts))


class Builder:
    """Collects the nodes of one graph or function body in the order they are written."""

    def __init__(self) -> None:
        self.nodes: list[ir.Node] = []
        self.initializers: dict[str, ir.Value] = {}
        self._constants: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = {}

    def op(self, op_type: str, *inputs: ir.Value | None, domain: str = "", **attributes: Any) -> ir.Value:
        """Appends a node of one output, which it returns. An attribute may be an `ir.Attr`, such as a
        reference to one of the function's own."""
        return self.ops(op_type, *inputs, outputs=1, domain=domain, **attributes)[0]

    def ops(
        self, op_type: str, *inputs: ir.Value | None, outputs: int, domain: str = "", **attributes: Any
    ) -> tuple[ir.Value, ...]:
        """`op` for a node of several outputs."""
        converted = [
            value if isinstance(value, ir.Attr) else ir.convenience.convert_attribute(name, value)
            for name, value in attributes.items()
        ]
        node = ir.Node(domain, op_type, inputs, converted, num_outputs=outputs)
        self.nodes.append(node)
        return tuple(node.outputs)

    def constant(self, value: Any, dtype: Any = np.int64) -> ir.Value:
        """A small constant; equal ones are shared."""
        array = np.asarray(value, dtype=dtype)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = self.op("Constant", value=ir.tensor(array))
        return self._constants[key]

    def initializer(self, tensor: ir.TensorProtocol) -> ir.Value:
        """A weight; asked for twice, it is shared."""
        name = tensor.name or ""
        if name not in self.initializers:
            self.initializers[name] = ir.Value(
                name=name,
                shape=ir.Shape(tensor.shape.numpy()),
                type=ir.TensorType(tensor.dtype),
                const_value=tensor,
            )
        return self.initializers[name]


def graph_input(name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> ir.Value:
    """An input with symbolic dimensions where `shape` has strings."""
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
