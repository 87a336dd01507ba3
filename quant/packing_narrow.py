"""GPTQ's 2 and 3 bits, as 4-bit tensors that stand for the same weights, and back: tiles and graphs have no
fewer."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import QuantizationError
from .packing import CheckpointFormat, pack_rows


def widen_gptq(
    qweight: NDArray[Any],
    qzeros: NDArray[Any],
    *,
    bits: int,
    out_features: int,
    in_features: int,
    checkpoint_format: CheckpointFormat,
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """`qweight` and `qzeros` of 2 or 3 bits as those of 4 bits in the checkpoint format "gptq_v2".

    Codes lie one after the other, low bits first, in int32 words: along the input in `qweight`
    [in * bits / 32, out], along the output in `qzeros` [groups, out * bits / 32], and one of 3 bits may lie
    in two words. Codes and zero points are moved by the same amount, so that the middle stays the middle: a
    symmetric tensor is one of 4 bits, too.
    """
    codes = unpack_words(qweight.T, bits, in_features) + moved(bits)
    zeros = widened_zeros(qzeros, out_features, bits, checkpoint_format)
    return np.ascontiguousarray(_four_bit_words(codes).T), _four_bit_words(zeros.T)


def widened_zeros(
    qzeros: NDArray[Any], out: int, bits: int, checkpoint_format: CheckpointFormat
) -> NDArray[np.uint8]:
    """The zero points [out, groups] of the 4-bit tensor."""
    zeros = unpack_words(qzeros, bits, out)
    if checkpoint_format == "gptq":  # which stores them less 1
        zeros = (zeros + np.uint8(1)) & np.uint8((1 << bits) - 1)
    return np.ascontiguousarray((zeros + moved(bits)).T)


def narrow_gptq(
    qweight: NDArray[Any],
    qzeros: NDArray[Any],
    *,
    bits: int,
    out_features: int,
    in_features: int,
    checkpoint_format: CheckpointFormat,
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The inverse of `widen_gptq`. Raises `QuantizationError` for a code or zero point that `bits` bits lack,
    or a zero point of 0 in "gptq", which lacks it."""
    codes = unpack_words(qweight.T, 4, in_features) - moved(bits)
    zeros = unpack_words(qzeros, 4, out_features) - moved(bits)
    if checkpoint_format == "gptq":
        zeros -= np.uint8(1)
    top = (1 << bits) - 1  # what is below 0 has wrapped around
    if max(codes.max(initial=0), zeros.max(initial=0)) > top:
        raise QuantizationError(f"a code or zero point is not one of {bits} bits")
    return np.ascontiguousarray(_pack_words(codes, bits).T), _pack_words(zeros, bits)


def moved(bits: int) -> np.uint8:
    """How much larger codes and zero points of `bits` bits are in a 4-bit tensor; 0 for 4 bits and more."""
    return np.uint8(max(0, 8 - (1 << (bits - 1))))


def unpack_words(words: NDArray[Any], bits: int, columns: int) -> NDArray[np.uint8]:
    """Rows of int32 words to [rows, columns] codes of any number of bits up to 8, low bits first."""
    unpacked = np.unpackbits(
        np.array(words, "<i4", order="C").view(np.uint8), axis=1, count=columns * bits, bitorder="little"
    )
    return np.packbits(unpacked.reshape(len(words), columns, bits), axis=2, bitorder="little")[:, :, 0]


def _pack_words(codes: NDArray[np.uint8], bits: int) -> NDArray[np.int32]:
    """The inverse of `unpack_words`; the last word is filled up with zero bits."""
    unpacked = np.unpackbits(codes[:, :, None], axis=2, count=bits, bitorder="little")
    packed = np.packbits(unpacked.reshape(len(codes), -1), axis=1, bitorder="little")
    padded = np.zeros((len(codes), -(-packed.shape[1] // 4) * 4), np.uint8)
    padded[:, : packed.shape[1]] = packed
    return padded.view("<i4").astype(np.int32, copy=False)


def _four_bit_words(codes: NDArray[np.uint8]) -> NDArray[np.int32]:
    padded = np.zeros((len(codes), -(-codes.shape[1] // 8) * 8), np.uint8)
    padded[:, : codes.shape[1]] = codes
    return pack_rows(padded, 4).view("<i4").astype(np.int32, copy=False)
