"""Bytes of a model's tensors, and of a token in the cache."""

import math
from collections.abc import Iterator

from ..models.spec import LinearSpec, ModelSpec
from ..quant.recipe import Recipe
from ..records import dataclass
from .profile import KvDtype

KV_BYTES: dict[KvDtype, int] = {"f32": 4, "f16": 2, "int16": 2, "int8": 1}
# They have a float32 scale for each token and head, and products of their own on a CPU.
INTEGER_KV: tuple[KvDtype, ...] = ("int16", "int8")
# The embedding and head of a quantized model, as quant.packing defines them.
HEAD_BITS, HEAD_GROUP_SIZE = 8, 32


def weight_bytes(spec: ModelSpec, recipe: Recipe | None) -> int:
    """Bytes of a model's tensors once each: packed integers, zero points, scales, norms, biases and
    gates in f16, embedding and head in 8 bits. `recipe` None is an unquantized model in float32."""
    if recipe is None:
        return 4 * sum(math.prod(shape) for shape in spec.tensors().values())
    matrices = [Matrix.of(linear, recipe) for linear in linears(spec)]
    matrices += [head_matrix(spec)] * (1 if spec.tied_embeddings else 2)
    return sum(m.data + 2 * m.scales + m.zeros for m in matrices) + 2 * float_elements(spec)


def kv_bytes_per_token(spec: ModelSpec, kv_dtype: KvDtype) -> int:
    """Bytes of one token's keys and values in all layers."""
    head = spec.head_dim * KV_BYTES[kv_dtype] + (4 if kv_dtype in INTEGER_KV else 0)
    return 2 * spec.num_layers * spec.num_kv_heads * head


@dataclass(frozen=True)
class Matrix:
    """A quantized matrix's bytes and counts, as `MatMulNBits` stores it."""

    data: int  # bytes of integers
    scales: int  # their number
    zeros: int  # bytes of zero points

    @classmethod
    def of(cls, linear: LinearSpec, recipe: Recipe) -> "Matrix":
        form = recipe.format_of(linear.name)
        return cls.sized(
            linear.out_features, linear.in_features, form.tensor_bits, form.group_size, form.symmetric
        )

    @classmethod
    def sized(cls, rows: int, columns: int, bits: int, group_size: int, symmetric: bool) -> "Matrix":
        # One group per row is written as blocks of 128 with a repeated scale.
        block = 128 if group_size == -1 else group_size
        blocks = -(-columns // block)
        zeros = 0 if symmetric else rows * -(-blocks * bits // 8)
        return cls(rows * blocks * (block * bits // 8), rows * blocks, zeros)


def head_matrix(spec: ModelSpec) -> Matrix:
    """The embedding, or the head."""
    return Matrix.sized(spec.vocab_size, spec.hidden_size, HEAD_BITS, HEAD_GROUP_SIZE, True)


def linears(spec: ModelSpec) -> Iterator[LinearSpec]:
    """The linear layers of all layers."""
    for layer in range(spec.num_layers):
        yield from spec.linears(layer)


def float_elements(spec: ModelSpec) -> int:
    """Of norms, biases, routers and gates."""
    shapes = spec.tensors()
    return sum(math.prod(shapes[name]) for name in spec.float_names)
