"""Weights as the CPU kernels read them: tiles of 16 output rows by 32 inputs (`kernels/layout.h`)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..quant.packing import QuantizedTensor, unpack_rows

TILE_ROWS = 16
SLICE = 32
TILES_AT_ONCE = 256  # what is unpacked together: at most a few megabytes
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
    """Repacks a quantized weight, some rows at a time. Rows are padded to whole tiles with zero weights,
    inputs to whole slices. A permutation stays with the caller: the tiles hold columns in stored order."""
    rows, columns, bits = tensor.out_features, tensor.in_features, tensor.bits
    tiles, slices = -(-rows // TILE_ROWS), -(-columns // SLICE)
    per_group = slices if tensor.group_size >= columns else tensor.group_size // SLICE
    kind = SYMMETRIC if tensor.zeros is None else ZERO_POINT
    header_bytes = TILE_ROWS * (2 if tensor.zeros is None else 3)
    slice_bytes = TILE_ROWS * SLICE * bits // 8
    packed = np.empty((tiles, tensor.groups * header_bytes + slices * slice_bytes), np.uint8)
    for first in range(0, tiles, TILES_AT_ONCE):
        part = packed[first : first + TILES_AT_ONCE]
        begin, end = first * TILE_ROWS, (first + len(part)) * TILE_ROWS
        body = _slices(unpack_rows(tensor.packed[begin:end], bits, columns), len(part), slices, bits)
        headers = _lanes(tensor.scales[begin:end], len(part))
        if tensor.zeros is not None:
            headers = np.concatenate([headers, _lanes(tensor.zeros[begin:end], len(part))], axis=2)
        at = 0
        for group in range(tensor.groups):
            part[:, at : at + header_bytes] = headers[:, group]
            at += header_bytes
            values = body[:, group * per_group : (group + 1) * per_group].reshape(len(part), -1)
            part[:, at : at + values.shape[1]] = values
            at += values.shape[1]
    return PackedLinear(packed.reshape(-1), rows, columns, bits, kind, per_group)


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
