"""The gated MLP of a graph: a layer's own, or an expert's."""

from collections.abc import Sequence

from ..models.spec import Activation, LinearSpec
from .onnx_builder import Builder
from .onnx_dependency import ir
from .onnx_linear import LinearWriter
from .weights import LogicalWeights


def write_mlp(
    writer: LinearWriter, weights: LogicalWeights, linears: Sequence[LinearSpec], x: ir.Value, fused: str
) -> ir.Value:
    """What gate, up and down give for `x` [T, hidden]; `fused` names gate and up as one operator."""
    b, activation = writer.builder, weights.spec.activation
    gate, up, down = linears
    gate_y, up_y = writer.linears(x, [gate, up], weights, fused)
    inner = b.op("Mul", activate(b, gate_y, activation), up_y)
    (y,) = writer.linears(inner, [down], weights, down.name)
    return y


def activate(b: Builder, x: ir.Value, activation: Activation) -> ir.Value:
    """The MLP's activation, elementwise."""
    if activation == "silu":
        return b.op("Mul", x, b.op("Sigmoid", x))
    if activation == "relu":
        return b.op("Relu", x)
    return b.op("Gelu", x, approximate="tanh" if activation == "gelu_tanh" else "none")
