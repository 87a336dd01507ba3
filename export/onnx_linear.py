"""Linear layers, embedding and head of a graph: how a logical tensor becomes operators and initializers.

| layer | operator | initializers |
|---|---|---|
| quantized linear | `com.microsoft.MatMulNBits` | `X.qweight`, `X.scales`; `.zero_points`, `.bias` |
| NF4 linear | `com.microsoft.MatMulBnb4` | `X.qweight` [out, in / 2], `X.absmax` [out, blocks]; `X.bias` |
| float linear | `Gemm` with transB | `X.weight` [out, in], `X.bias` |
| quantized embedding | `com.microsoft.GatherBlockQuantized` | `X.qweight` 2-D, `X.scales` |
| float embedding | `Gather` | `X.weight` |

(A permuted one has `X.permutation`, which goes to a `Gather` of the activations.)

`X` is the tensor's name without `.weight`. Layers that read the same activations and were quantized alike are
one operator, its rows theirs in order: q, k and v as `qkv_proj`, gate and up as `gate_up_proj`. Each stored
linear is listed in `LinearLayout`, from which a reader gets the logical tensors back.
"""

from collections.abc import Sequence
from dataclasses import field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import UnsupportedModelError
from ..models.spec import LinearSpec
from ..quant.packing import QuantizedTensor, matmulnbits_block, to_matmulnbits
from ..quant.packing_bnb import swap_nibbles
from ..quant.packing_nf4 import Nf4Tensor
from ..records import dataclass
from .onnx_builder import MICROSOFT, Builder, TensorStore
from .onnx_dependency import ir
from .weights import LogicalTensor, LogicalWeights

NF4_TYPE = 1  # MatMulBnb4's quant_type


@dataclass(frozen=True)
class StoredTensor:
    """Where one logical weight lies: rows of the stored tensor called `stored`."""

    stored: str  # initializers are named stored + ".qweight" and so on
    row: int
    rows: int
    columns: int
    bits: int | None = None  # None is float32
    group_size: int | None = None  # resolved: in_features for a recipe's -1


@dataclass
class LinearWriter:
    """Writes linear layers into `builder`, their tensors into `store`; `layout` says what went where, by
    logical tensor name."""

    builder: Builder
    store: TensorStore
    accuracy_level: int
    layout: dict[str, StoredTensor] = field(default_factory=dict)

    def put(self, name: str, *parts: NDArray[Any]) -> ir.Value:
        """An initializer of the parts stacked along axis 0."""
        return self.builder.initializer(self.store.add(name, parts))

    def linears(
        self, x: ir.Value, layers: Sequence[LinearSpec], weights: LogicalWeights, fused: str
    ) -> list[ir.Value]:
        """The outputs of `layers`, which all read `x` [T, in]; one operator called `fused` where they are
        alike."""
        tensors = [weights.tensor(layer.name) for layer in layers]
        biases = [
            as_float(weights.tensor(layer.bias_name), layer.bias_name) if layer.bias else None
            for layer in layers
        ]
        if len(layers) == 1 or not _alike(tensors) or len({b is None for b in biases}) > 1:
            return [
                self._linear(x, layer.name.removesuffix(".weight"), [layer], [tensor], [bias])
                for layer, tensor, bias in zip(layers, tensors, biases, strict=True)
            ]
        y = self._linear(x, fused, layers, tensors, biases)
        sizes = self.builder.constant([layer.out_features for layer in layers])
        return list(self.builder.ops("Split", y, sizes, outputs=len(layers), axis=1))

    def _linear(
        self,
        x: ir.Value,
        stored: str,
        layers: Sequence[LinearSpec],
        tensors: Sequence[LogicalTensor],
        biases: Sequence[NDArray[np.float32] | None],
    ) -> ir.Value:
        row = 0
        for layer, tensor in zip(layers, tensors, strict=True):
            kind = (None, None) if isinstance(tensor, np.ndarray) else (tensor.bits, tensor.group_size)
            self.layout[layer.name] = StoredTensor(stored, row, layer.out_features, layer.in_features, *kind)
            row += layer.out_features
        given = [bias for bias in biases if bias is not None]
        bias = self.put(stored + ".bias", *given) if given else None
        first = tensors[0]
        if isinstance(first, Nf4Tensor):
            return self._nf4(x, stored, [t for t in tensors if isinstance(t, Nf4Tensor)], bias)
        if not isinstance(first, QuantizedTensor):
            weight = self.put(stored + ".weight", *(as_float(t, stored) for t in tensors))
            return self.builder.op("Gemm", x, weight, *([bias] if bias else []), transB=1)
        packed = [to_matmulnbits(t) for t in tensors if isinstance(t, QuantizedTensor)]
        b = self.put(stored + ".qweight", *(p[0] for p in packed))
        scales = self.put(stored + ".scales", *(p[1] for p in packed))
        zeros = [p[2] for p in packed if p[2] is not None]
        zero_points = self.put(stored + ".zero_points", *zeros) if zeros else None
        if first.permutation is not None:
            x = self._permute(x, stored, first.permutation)
        return self.matmul(x, b, scales, zero_points, bias, first, row)

    def matmul(
        self,
        x: ir.Value,
        b: ir.Value,
        scales: ir.Value,
        zero_points: ir.Value | None,
        bias: ir.Value | None,
        like: QuantizedTensor,
        rows: int,
    ) -> ir.Value:
        """One `MatMulNBits` of `rows` outputs over `like`'s bits and groups."""
        inputs = [x, b, scales, zero_points, None, bias]
        while inputs[-1] is None:
            inputs.pop()
        return self.builder.op(
            "MatMulNBits",
            *inputs,
            domain=MICROSOFT,
            K=like.in_features,
            N=rows,
            bits=like.bits,
            block_size=matmulnbits_block(like.group_size, like.in_features),
            accuracy_level=self.accuracy_level,
        )

    def _nf4(self, x: ir.Value, stored: str, tensors: Sequence[Nf4Tensor], bias: ir.Value | None) -> ir.Value:
        """One `MatMulBnb4`, which counts codes and blocks over the rows one after another: the shapes of its
        inputs mean nothing to it, and here have the rows that a reader asks for."""
        b = self.put(stored + ".qweight", *(swap_nibbles(t.packed) for t in tensors))
        absmax = self.put(stored + ".absmax", *(t.scales.astype(np.float32) for t in tensors))
        y = self.builder.op(
            "MatMulBnb4",
            x,
            b,
            absmax,
            domain=MICROSOFT,
            K=tensors[0].in_features,
            N=sum(t.out_features for t in tensors),
            block_size=tensors[0].group_size,
            quant_type=NF4_TYPE,
        )
        return y if bias is None else self.builder.op("Add", y, bias)

    def _permute(self, x: ir.Value, stored: str, permutation: NDArray[np.int32]) -> ir.Value:
        """`x` with its columns in the tensor's stored order. (MatMulNBits' own g_idx is wrong with general
        zero points.) Layers with the same order share the operator, but each has its own initializer."""
        index = self.put(stored + ".permutation", permutation.astype(np.int32))
        return self.builder.op("Gather", x, index, axis=1)


@dataclass(frozen=True)
class Embedding:
    """The stored embedding, kept for a tied head. Quantized: `weight` is `X.qweight` [vocab, bytes]."""

    weight: ir.Value
    scales: ir.Value | None
    like: QuantizedTensor | None


def write_embedding(
    writer: LinearWriter, name: str, tensor: LogicalTensor, token_ids: ir.Value, hidden_size: int
) -> tuple[ir.Value, Embedding]:
    """Token embeddings [T, hidden] and what a tied head needs of them."""
    b = writer.builder
    embedding = store_embedding(writer, name, tensor)
    if embedding.like is None:
        return b.op("Gather", embedding.weight, token_ids, axis=0), embedding
    like = embedding.like
    rows = b.op(
        "GatherBlockQuantized",
        embedding.weight,
        token_ids,
        embedding.scales,
        domain=MICROSOFT,
        bits=like.bits,
        block_size=matmulnbits_block(like.group_size, like.in_features),
        gather_axis=0,
        quantize_axis=1,
    )
    if like.in_features % matmulnbits_block(like.group_size, like.in_features):
        zero, end = b.constant([0]), b.constant([hidden_size])
        rows = b.op("Slice", rows, zero, end, b.constant([1]))
    return rows, embedding


def store_embedding(writer: LinearWriter, name: str, tensor: LogicalTensor) -> Embedding:
    """Puts an embedding or head away. Quantized data are 2-D, for GatherBlockQuantized; a head reshapes
    them (the other way round, constant folding would copy them)."""
    stored = name.removesuffix(".weight")
    if isinstance(tensor, np.ndarray):
        writer.layout[name] = StoredTensor(stored, 0, *tensor.shape)
        return Embedding(writer.put(stored + ".weight", tensor), None, None)
    if isinstance(tensor, Nf4Tensor):
        raise UnsupportedModelError(f"{name}: in NF4, which an embedding or head in ONNX is not")
    if tensor.zeros is not None or tensor.permutation is not None:
        raise UnsupportedModelError(
            f"{name}: asymmetric or permuted; an embedding or head is neither in ONNX"
        )
    writer.layout[name] = StoredTensor(
        stored, 0, tensor.out_features, tensor.in_features, tensor.bits, tensor.group_size
    )
    data, scales, _ = to_matmulnbits(tensor)
    weight = writer.put(stored + ".qweight", data.reshape(len(data), -1))
    like = QuantizedTensor(
        tensor.packed[:0], tensor.scales[:0], None, tensor.bits, tensor.group_size, tensor.in_features
    )
    return Embedding(weight, writer.put(stored + ".scales", scales), like)


def write_head(writer: LinearWriter, x: ir.Value, head: Embedding, vocab_size: int) -> ir.Value:
    """Logits [R, vocab] of `x` [R, hidden]."""
    b = writer.builder
    if head.like is None or head.scales is None:
        return b.op("Gemm", x, head.weight, transB=1)
    block = matmulnbits_block(head.like.group_size, head.like.in_features)
    blocks = -(-head.like.in_features // block)
    shape = b.constant([vocab_size, blocks, block * head.like.bits // 8])
    weight = b.op("Reshape", head.weight, shape)
    return writer.matmul(x, weight, head.scales, None, None, head.like, vocab_size)


def _alike(tensors: Sequence[LogicalTensor]) -> bool:
    """Whether the tensors can be rows of one operator."""

    def key(t: LogicalTensor) -> tuple[Any, ...]:
        if isinstance(t, np.ndarray):
            return ()
        if isinstance(t, Nf4Tensor):
            return "nf4", t.group_size, t.in_features
        order = None if t.permutation is None else t.permutation.tobytes()
        return t.bits, t.group_size, t.in_features, t.zeros is None, order

    return len({key(t) for t in tensors}) == 1


def as_float(tensor: LogicalTensor, name: str) -> NDArray[np.float32]:
    """A tensor that has to be float32: a norm, a bias, or one alike with others that are."""
    if not isinstance(tensor, np.ndarray):
        raise UnsupportedModelError(f"{name}: quantized; the ONNX graph needs it in float32")
    return tensor
