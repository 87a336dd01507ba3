"""`QuantizedTensor`, and the one definition of every packed layout, in numpy."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

HEAD_BITS = 8
HEAD_GROUP_SIZE = 32


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A weight [out_features, in_features] as integers, one scale and one zero point per row and group:
    `w[n, k] = (code[n, k] - zero[n, g]) * scale[n, g]`, with `g = k // group_size`.

    `group_size` is resolved: it is `in_features` for a recipe's −1. The last group may be short.
    """

    packed: NDArray[np.uint8]  # [out, ceil(in * bits / 8)], each row low bits first
    scales: NDArray[np.float16]  # [out, groups]
    zeros: NDArray[np.uint8] | None  # [out, groups]; None is 2 ** (bits - 1) everywhere: symmetric
    bits: int
    group_size: int
    in_features: int
    # desc_act: stored column j is the weight's column permutation[j]; groups are of stored columns.
    permutation: NDArray[np.int32] | None = None

    @property
    def out_features(self) -> int:
        return int(self.packed.shape[0])

    @property
    def groups(self) -> int:
        return -(-self.in_features // self.group_size)

    @property
    def nbytes(self) -> int:
        parts = (self.packed, self.scales, self.zeros, self.permutation)
        return sum(p.nbytes for p in parts if p is not None)

    @property
    def codes(self) -> NDArray[np.uint8]:
        """The integers, [out, in] uint8, in stored column order."""
        return unpack_rows(self.packed, self.bits, self.in_features)

    @cached_property
    def zero_points(self) -> NDArray[np.uint8]:
        """[out, groups] uint8, also where the tensor is symmetric."""
        if self.zeros is not None:
            return self.zeros
        return np.full(self.scales.shape, 1 << (self.bits - 1), np.uint8)

    def dequantize(self) -> NDArray[np.float32]:
        """The weight the integers stand for, [out, in] float32, in the model's own column order."""
        group = np.arange(self.in_features) // self.group_size
        centred = self.codes.astype(np.float32) - self.zero_points.astype(np.float32)[:, group]
        stored = centred * self.scales.astype(np.float32)[:, group]
        if self.permutation is None:
            return stored
        weight = np.empty_like(stored)
        weight[:, self.permutation] = stored
        return weight


def pack_rows(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """[out, in] codes of 4 or 8 bits to [out, ceil(in * bits / 8)] bytes, low nibble first; a last odd
    nibble's partner is 0."""
    if bits == 8:
        return np.ascontiguousarray(codes)
    if codes.shape[1] % 2:
        codes = np.pad(codes, ((0, 0), (0, 1)))
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def unpack_rows(packed: NDArray[np.uint8], bits: int, columns: int) -> NDArray[np.uint8]:
    """The inverse of `pack_rows`: [out, columns] uint8."""
    if bits == 8:
        return packed[:, :columns]
    codes = np.empty((packed.shape[0], packed.shape[1] * 2), np.uint8)
    codes[:, 0::2] = packed & 15
    codes[:, 1::2] = packed >> 4
    return codes[:, :columns]


def quantize_head(weight: NDArray[np.float32] | NDArray[np.float16]) -> QuantizedTensor:
    """The one definition of an embedding or head [vocab, hidden]: rounded to f16 first (as the GPTQ half
    keeps it), then 8 bits, round to nearest, symmetric, groups of 32, f16 scales."""
    raise NotImplementedError
