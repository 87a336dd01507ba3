"""Bytes of a model's packed weights, layer by layer, as `CpuExecutor` has them (runtime/kernels/layout.h) and
as they lie in the file of packed weights (runtime/packed_file.py)."""

import math
from collections.abc import Iterator
from functools import lru_cache

from ..errors import SettingError
from ..models.spec import LinearSpec, ModelSpec
from ..quant.recipe import Recipe
from ..records import dataclass
from .model_bytes import HEAD_BITS, HEAD_GROUP_SIZE, linears

# Of the file: a section is filled up to SECTION bytes, its tensors begin at multiples of TENSOR.
SECTION, TENSOR = 4096, 64
ATTENTION = 4  # linear layers before those of experts


@dataclass(frozen=True)
class LayerBytes:
    """One layer: its linear layers' tiles with what they permute their inputs by, and the latter alone, which
    stays in memory in any case; its norms, biases and gates; and its section of the file, which is what a
    buffer holds of it while it is streamed.

    Of a mixture without the shared expert: what of `linears` is its experts'; the largest expert's part of
    the file, which is what a slot holds; and the part of the section before them, which is all of it where
    there is no mixture.
    """

    linears: int
    permutations: int
    vectors: int
    section: int
    experts: int
    largest_expert: int
    dense_section: int

    def read(self, by_use: bool) -> int:
        """Of the section, what is read in every step of a layer that is streamed, where experts are read
        when they are chosen and where they are not."""
        return self.dense_section if by_use else self.section


@dataclass(frozen=True)
class PackedBytes:
    """A model: its layers; the embedding, with the head where that is another matrix; the last norm."""

    layers: tuple[LayerBytes, ...]
    embedding: int
    ends: int
    last_norm: int

    @property
    def largest_expert(self) -> int:
        return max(layer.largest_expert for layer in self.layers)


def packed_bytes(
    spec: ModelSpec, recipe: Recipe | None, linear_bytes: tuple[int, ...] | None = None
) -> PackedBytes:
    """`linear_bytes` are the tiles of each linear layer in order, for a model whose layers differ; without
    them they follow from `recipe`. Raises `SettingError` for an unquantized model."""
    if recipe is None and linear_bytes is None:
        raise SettingError("executor is 'cpu', which runs quantized models only; use 'ort'")
    return _packed_bytes(spec, recipe, linear_bytes)


@lru_cache(maxsize=8)
def _packed_bytes(
    spec: ModelSpec, recipe: Recipe | None, linear_bytes: tuple[int, ...] | None
) -> PackedBytes:
    matrices = iter(linear_bytes or (_matrix_bytes(linear, recipe) for linear in linears(spec)))
    permuted = recipe is not None and recipe.desc_act
    embedding = tile_bytes(spec.vocab_size, spec.hidden_size, HEAD_BITS, HEAD_GROUP_SIZE, True)
    return PackedBytes(
        tuple(_layer_bytes(spec, layer, matrices, permuted) for layer in range(spec.num_layers)),
        embedding,
        embedding * (1 if spec.tied_embeddings else 2),
        4 * spec.hidden_size,
    )


def _layer_bytes(spec: ModelSpec, layer: int, matrices: Iterator[int], permuted: bool) -> LayerBytes:
    """Takes the layer's linear layers off `matrices`."""
    vectors = [4 * size for size in spec.norms(layer).values()]
    vectors += [4 * math.prod(shape) for shape in spec.gates(layer).values()]
    tiles, permutations = [], []
    for linear in spec.linears(layer):
        tiles.append(next(matrices))
        permutations.append(4 * linear.in_features if permuted else 0)
        vectors += [4 * linear.out_features] if linear.bias else []
    first, end = ATTENTION, ATTENTION + len(spec.expert_names(layer))
    in_file = [padded(a, TENSOR) + padded(b, TENSOR) for a, b in zip(tiles, permutations, strict=True)]
    section = sum(in_file) + sum(padded(size, TENSOR) for size in vectors)
    return LayerBytes(
        linears=sum(tiles) + sum(permutations),
        permutations=sum(permutations),
        vectors=sum(vectors),
        section=padded(section, SECTION),
        experts=sum(tiles[first:end]) + sum(permutations[first:end]),
        largest_expert=max((sum(in_file[i : i + 3]) for i in range(first, end, 3)), default=0),
        dense_section=padded(section - sum(in_file[first:end]), SECTION),
    )


def _matrix_bytes(linear: LinearSpec, recipe: Recipe | None) -> int:
    assert recipe is not None
    form = recipe.format_of(linear.name)
    return tile_bytes(
        linear.out_features, linear.in_features, form.tensor_bits, form.group_size, form.symmetric
    )


def tile_bytes(rows: int, columns: int, bits: int, group_size: int, symmetric: bool) -> int:
    """A matrix in tiles: every group of a tile has 16 f16 scales and, unless symmetric, 16 zero points of as
    many bits as a code."""
    slices = -(-columns // 32)
    groups = 1 if group_size == -1 else -(-columns // group_size)
    return -(-rows // 16) * (groups * (32 if symmetric else 32 + 2 * bits) + slices * 64 * bits)


def padded(n: int, multiple: int) -> int:
    """The next multiple of `multiple`."""
    return -(-n // multiple) * multiple
