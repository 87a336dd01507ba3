"""A mixture of experts in standard operators: rows are sorted by expert, each expert multiplies its own, and
what it gives a token is gathered again in the experts' order.

An expert that no token chose gets no rows, and its weights are not read.
"""

import numpy as np

from ..models.spec import LinearSpec, MixtureSpec
from .onnx_builder import Builder
from .onnx_dependency import ir
from .onnx_linear import LinearWriter, as_float
from .onnx_mlp import write_mlp
from .weights import LogicalWeights


def write_mixture(writer: LinearWriter, weights: LogicalWeights, layer: int, x: ir.Value) -> ir.Value:
    """What a layer's mixture gives for `x` [T, hidden]: [T, hidden]."""
    spec, b = weights.spec, writer.builder
    mixture = spec.mixture_of(layer)
    assert mixture is not None
    router, *shared_gate = (
        writer.put(name, as_float(weights.tensor(name), name)) for name in spec.gates(layer)
    )
    linears = spec.linears(layer)[4:]
    logits = b.op("Gemm", x, router, transB=1)  # [T, E]
    chosen = _chosen(b, mixture, logits)
    by_expert = b.op("Transpose", chosen, perm=[1, 0])
    tokens = b.op("Gather", b.op("NonZero", by_expert), b.constant(1), axis=0)  # [T * k], expert by expert
    counts = b.op("ReduceSum", by_expert, b.constant([1]), keepdims=0)
    parts = b.ops("Split", b.op("Gather", x, tokens, axis=0), counts, outputs=mixture.num_experts, axis=0)
    given = [
        _write_expert(writer, weights, linears[3 * expert :][:3], part) for expert, part in enumerate(parts)
    ]
    rows = b.op("Concat", *given, axis=0) if len(given) > 1 else given[0]
    # Where in `rows` each token's are, in ascending order of experts.
    places = b.op("Transpose", b.op("NonZero", chosen), perm=[1, 0])  # [T * k, 2], token by token
    counted = b.op("CumSum", b.op("Reshape", by_expert, b.constant([-1])), b.constant(0))
    row_of = b.op("Sub", b.op("Reshape", counted, b.op("Shape", by_expert)), b.constant(1))
    order = b.op("GatherND", b.op("Transpose", row_of, perm=[1, 0]), places)
    shape = b.constant([-1, mixture.experts_per_token, spec.hidden_size])
    y = b.op("Reshape", b.op("Gather", rows, order, axis=0), shape)
    y = b.op("ReduceSum", b.op("Mul", y, _shares(b, mixture, logits, places)), b.constant([1]), keepdims=0)
    if shared_gate:
        share = b.op("Sigmoid", b.op("Gemm", x, shared_gate[0], transB=1))
        y = b.op("Add", y, b.op("Mul", _write_expert(writer, weights, linears[-3:], x), share))
    return y


def _chosen(b: Builder, mixture: MixtureSpec, logits: ir.Value) -> ir.Value:
    """1 for the experts of each token, else 0: [T, E] int64. TopK takes the lower index of equal values."""
    count = b.constant([mixture.experts_per_token])
    _, indices = b.ops("TopK", logits, count, outputs=2, axis=1)
    zeros = b.op("ConstantOfShape", b.op("Shape", logits), value=ir.tensor(np.zeros(1, np.int64)))
    ones = b.op("ConstantOfShape", b.op("Shape", indices), value=ir.tensor(np.ones(1, np.int64)))
    return b.op("ScatterElements", zeros, indices, ones, axis=1)


def _shares(b: Builder, mixture: MixtureSpec, logits: ir.Value, places: ir.Value) -> ir.Value:
    """The weights of each token's experts, in their order: [T, k, 1]."""
    shares = b.op("GatherND", b.op("Softmax", logits, axis=1), places)
    shares = b.op("Reshape", shares, b.constant([-1, mixture.experts_per_token, 1]))
    if not mixture.normalized:
        return shares
    return b.op("Div", shares, b.op("ReduceSum", shares, b.constant([1]), keepdims=1))


def _write_expert(
    writer: LinearWriter, weights: LogicalWeights, linears: tuple[LinearSpec, ...], x: ir.Value
) -> ir.Value:
    stem = linears[0].name.rsplit(".", 2)[0]
    return write_mlp(writer, weights, linears, x, f"{stem}.gate_up_proj")
