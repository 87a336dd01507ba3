"""Weights as the CPU kernels read them: tiles of 16 output rows by 32 inputs (`kernels/layout.h`)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..quant.packing import QuantizedTensor

TILE_ROWS = 16
SLICE = 32
SYMMETRIC, ZERO_POINT = 0, 1


@dataclass(frozen=True, eq=False)
class PackedLinear:
    """One linear layer's tiles, and what the kernels need to walk them."""

    tiles: NDArray[np.uint8]  # [bytes]
    rows: int
    columns: int
    bits: int
    kind: int
    slices_per_group: int


def pack(tensor: QuantizedTensor) -> PackedLinear:
    """Repacks a quantized weight. Rows are padded to whole tiles with zero weights, inputs to whole slices.
    A permutation stays with the caller: the tiles hold columns in stored order."""
    rows, columns, bits = tensor.out_features, tensor.in_features, tensor.bits
    tiles, slices = -(-rows // TILE_ROWS), -(-columns // SLICE)
    per_group = slices if tensor.group_size >= columns else tensor.group_size // SLICE
    kind = SYMMETRIC if tensor.zeros is None else ZERO_POINT

    codes: NDArray[np.uint8] = np.zeros((tiles * TILE_ROWS, slices * SLICE), np.uint8)
    body: NDArray[np.uint8]
    codes[:rows, :columns] = tensor.codes
    if bits == 4:
        parts = codes.reshape(tiles, TILE_ROWS, slices, 4, 2, 4)
        body = parts[..., 0, :] | (parts[..., 1, :] << 4)
    else:
        body = codes.reshape(tiles, TILE_ROWS, slices, 8, 4)
    body = body.transpose(0, 2, 3, 1, 4).reshape(tiles, slices, -1)

    header = _headers(tensor, tiles)
    groups, slice_bytes = header.shape[1], body.shape[2]
    packed = np.empty((tiles, groups * header.shape[2] + slices * slice_bytes), np.uint8)
    at = 0
    for group in range(groups):
        packed[:, at : at + header.shape[2]] = header[:, group]
        at += header.shape[2]
        part = body[:, group * per_group : (group + 1) * per_group]
        size = part.shape[1] * slice_bytes
        packed[:, at : at + size] = part.reshape(tiles, size)
        at += size
    return PackedLinear(packed.reshape(-1), rows, columns, bits, kind, per_group)


def _headers(tensor: QuantizedTensor, tiles: int) -> NDArray[np.uint8]:
    """Scales, then zero points, of every tile and group: [tiles, groups, bytes]."""

    def by_tile(values: NDArray[np.generic]) -> NDArray[np.uint8]:
        padded = np.zeros((tiles * TILE_ROWS, values.shape[1]), values.dtype)
        padded[: values.shape[0]] = values
        lanes = padded.reshape(tiles, TILE_ROWS, -1).transpose(0, 2, 1)
        return np.ascontiguousarray(lanes).view(np.uint8)

    scales = by_tile(tensor.scales)
    return scales if tensor.zeros is None else np.concatenate([scales, by_tile(tensor.zeros)], axis=2)
