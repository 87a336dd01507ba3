"""Weights as the CPU kernels read them: tiles of 16 output rows by 32 inputs (`kernels/layout.h`)."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import UnsupportedModelError
from ..export.weights import LogicalWeights
from ..models.spec import ModelSpec
from ..quant.packing import QuantizedTensor, unpack_rows
from ..quant.packing_ggml import GgmlType
from ..quant.packing_nf4 import Nf4Tensor

# Raised whenever the same weights would become other bytes: files of packed weights are then made again.
LAYOUT_VERSION = 1
TILE_ROWS = 16
SLICE = 32
TILES_AT_ONCE = 256  # what is unpacked together: at most a few megabytes
SYMMETRIC, ZERO_POINT, MINIMUM, NF4 = range(4)
# Of each group of a tile, by kind.
HEADER_BYTES = {
    SYMMETRIC: TILE_ROWS * 2, ZERO_POINT: TILE_ROWS * 3, MINIMUM: TILE_ROWS * 4, NF4: TILE_ROWS * 2,
}  # fmt: skip
# Of a code, by kind.
KIND_BITS = {SYMMETRIC: (4, 8), ZERO_POINT: (4, 8), MINIMUM: (4,), NF4: (4,)}


@dataclass(frozen=True, eq=False)
class PackedLinear:
    """One linear layer's tiles, and what the kernels need to walk them."""

    tiles: NDArray[np.uint8]  # [bytes]
    rows: int
    columns: int
    bits: int
    kind: int
    slices_per_group: int
    permutation: NDArray[np.int32] | None = None  # stored column j is the input's column permutation[j]

    @property
    def tile_bytes(self) -> int:
        """Bytes of 16 rows."""
        return self.tiles.nbytes // -(-self.rows // TILE_ROWS)


class PackedSource(Protocol):
    """A model's tensors by their Hugging Face names, as the kernels read them."""

    @property
    def spec(self) -> ModelSpec: ...

    def linear(self, name: str) -> PackedLinear: ...

    def vector(self, name: str) -> NDArray[np.float32]: ...


class FreshlyPacked:
    """`PackedSource` over logical weights: each tensor is read and packed when it is asked for, and none is
    kept."""

    def __init__(self, weights: LogicalWeights) -> None:
        self._weights = weights

    @property
    def spec(self) -> ModelSpec:
        return self._weights.spec

    def linear(self, name: str) -> PackedLinear:
        """Raises `UnsupportedModelError` for a tensor that is not quantized, or that no tile expresses."""
        tensor = self._weights.tensor(name)
        if not isinstance(tensor, QuantizedTensor):
            raise UnsupportedModelError(
                f"tensor {name} is not quantized; executor 'cpu' runs quantized models only"
            )
        return pack(tensor, f"tensor {name}")

    def vector(self, name: str) -> NDArray[np.float32]:
        """A norm's weight or a bias, [n] float32."""
        tensor = self._weights.tensor(name)
        assert not isinstance(tensor, QuantizedTensor)
        return np.ascontiguousarray(tensor, np.float32)


def tiles_bytes(rows: int, columns: int, bits: int, kind: int, slices_per_group: int) -> int:
    """Bytes of one linear layer's tiles."""
    slices = -(-columns // SLICE)
    groups = -(-slices // slices_per_group)
    tile = groups * HEADER_BYTES[kind] + slices * (TILE_ROWS * SLICE * bits // 8)
    return -(-rows // TILE_ROWS) * tile


def ggml_tiles_bytes(rows: int, columns: int, kind: GgmlType) -> int:
    """Bytes of the tiles of a matrix that keeps the bits of a ggml type."""
    bits = 8 if kind == "Q8_0" else 4
    return tiles_bytes(rows, columns, bits, MINIMUM if kind == "Q4_1" else SYMMETRIC, 1)


def pack(tensor: QuantizedTensor | Nf4Tensor, name: str = "tensor") -> PackedLinear:
    """Repacks a quantized weight, some rows at a time. Rows are padded to whole tiles with zero weights,
    inputs to whole slices.

    A tensor has one packed form, whichever half of an artifact it was read from: columns of a group ascend,
    which the halves keep or not, and zero points that are all in the middle are left out. Raises
    `UnsupportedModelError` naming `name` for minima with 8 bits, and for a group size that is no multiple of
    32, short of one group a row: the activations' scales, too, are for 32 inputs each.
    """
    rows, columns, bits = tensor.out_features, tensor.in_features, tensor.bits
    tiles, slices = -(-rows // TILE_ROWS), -(-columns // SLICE)
    if tensor.group_size < columns and tensor.group_size % SLICE:
        raise UnsupportedModelError(
            f"{name} has groups of {tensor.group_size} inputs; executor 'cpu' has groups of a multiple of "
            f"{SLICE}, or one a row; try executor 'ort'"
        )
    per_group = slices if tensor.group_size >= columns else tensor.group_size // SLICE
    order, permutation = _column_order(tensor)
    kind, header = _header(tensor)
    if bits not in KIND_BITS[kind]:
        raise UnsupportedModelError(
            f"{name} has minima with {bits} bits; executor 'cpu' has minima with 4 bits"
        )
    header_bytes = HEADER_BYTES[kind]
    slice_bytes = TILE_ROWS * SLICE * bits // 8
    packed = np.empty((tiles, tensor.groups * header_bytes + slices * slice_bytes), np.uint8)
    for first in range(0, tiles, TILES_AT_ONCE):
        part = packed[first : first + TILES_AT_ONCE]
        begin, end = first * TILE_ROWS, (first + len(part)) * TILE_ROWS
        codes = unpack_rows(tensor.packed[begin:end], bits, columns)
        body = _slices(codes if order is None else codes[:, order], len(part), slices, bits)
        headers = np.concatenate([_lanes(values[begin:end], len(part)) for values in header], axis=2)
        at = 0
        for group in range(tensor.groups):
            part[:, at : at + header_bytes] = headers[:, group]
            at += header_bytes
            values = body[:, group * per_group : (group + 1) * per_group].reshape(len(part), -1)
            part[:, at : at + values.shape[1]] = values
            at += values.shape[1]
    return PackedLinear(packed.reshape(-1), rows, columns, bits, kind, per_group, permutation)


def _header(tensor: QuantizedTensor | Nf4Tensor) -> tuple[int, tuple[NDArray[np.generic], ...]]:
    """A tensor's kind, and what a header holds of each row and group, in order: arrays [rows, groups]."""
    if isinstance(tensor, Nf4Tensor):
        return NF4, (tensor.scales,)
    if tensor.minima is not None:
        return MINIMUM, (tensor.scales, tensor.minima)
    if tensor.zeros is None or (tensor.zeros == 1 << (tensor.bits - 1)).all():
        return SYMMETRIC, (tensor.scales,)
    return ZERO_POINT, (tensor.scales, tensor.zeros)


def _column_order(
    tensor: QuantizedTensor | Nf4Tensor,
) -> tuple[NDArray[np.intp] | None, NDArray[np.int32] | None]:
    """How stored columns are packed, and the permutation that they then have; None is as they are."""
    if tensor.permutation is None:
        return None, None
    group = np.arange(tensor.in_features) // tensor.group_size
    order = np.lexsort((tensor.permutation, group))
    permutation = tensor.permutation[order]
    if np.array_equal(permutation, np.arange(tensor.in_features)):
        return order, None
    return order, np.ascontiguousarray(permutation, np.int32)


def _slices(codes: NDArray[np.uint8], tiles: int, slices: int, bits: int) -> NDArray[np.uint8]:
    """Codes [rows, columns] as the slices of their tiles, [tiles, slices, bytes]."""
    padded: NDArray[np.uint8] = np.zeros((tiles * TILE_ROWS, slices * SLICE), np.uint8)
    padded[: codes.shape[0], : codes.shape[1]] = codes
    if bits == 4:
        parts = padded.reshape(tiles, TILE_ROWS, slices, 4, 2, 4)
        padded = np.bitwise_or(parts[..., 0, :], parts[..., 1, :] << 4, dtype=np.uint8)
    else:
        padded = padded.reshape(tiles, TILE_ROWS, slices, 8, 4)
    return padded.transpose(0, 2, 3, 1, 4).reshape(tiles, slices, -1)


def _lanes(values: NDArray[np.generic], tiles: int) -> NDArray[np.uint8]:
    """A value for each row and group, [rows, groups], as bytes by tile and group: [tiles, groups, bytes]."""
    padded = np.zeros((tiles * TILE_ROWS, values.shape[1]), values.dtype)
    padded[: values.shape[0]] = values
    lanes = padded.reshape(tiles, TILE_ROWS, -1).transpose(0, 2, 1)
    return np.ascontiguousarray(lanes).view(np.uint8)
