"""`QuantizedTensor`, and the one definition of every packed layout, in numpy."""

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelFormatError, QuantizationError
from ..records import dataclass

HEAD_BITS = 8
HEAD_GROUP_SIZE = 32
LARGEST_F16 = 65504.0


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A weight [out_features, in_features] as integers, one scale and one zero point per row and group:
    `w[n, k] = (code[n, k] - zero[n, g]) * scale[n, g]`, with `g = k // group_size`. Or, with a minimum in the
    zero point's place, `w[n, k] = code[n, k] * scale[n, g] + minimum[n, g]`.

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
    minima: NDArray[np.float16] | None = None  # [out, groups]; `zeros` is None then

    @property
    def out_features(self) -> int:
        return int(self.packed.shape[0])

    @property
    def groups(self) -> int:
        return -(-self.in_features // self.group_size)

    @property
    def nbytes(self) -> int:
        parts = (self.packed, self.scales, self.zeros, self.permutation, self.minima)
        return sum(p.nbytes for p in parts if p is not None)

    @property
    def codes(self) -> NDArray[np.uint8]:
        """The integers, [out, in] uint8, in stored column order."""
        return unpack_rows(self.packed, self.bits, self.in_features)

    @cached_property
    def zero_points(self) -> NDArray[np.uint8]:
        """[out, groups] uint8, also where the tensor is symmetric. Raises `QuantizationError` where it has
        minima, so that no format without them takes it."""
        if self.minima is not None:
            raise QuantizationError("a tensor with minima has no zero points; only executor 'cpu' runs it")
        if self.zeros is not None:
            return self.zeros
        return np.full(self.scales.shape, 1 << (self.bits - 1), np.uint8)

    def dequantize(self) -> NDArray[np.float32]:
        """The weight the integers stand for, [out, in] float32, in the model's own column order."""

        def widened(by_group: NDArray[Any]) -> NDArray[np.float32]:
            return by_group.astype(np.float32).repeat(self.group_size, axis=1)[:, : self.in_features]

        weight = np.empty((self.out_features, self.in_features), np.float32)
        for rows in row_blocks(self.out_features, self.in_features, 1 << 17):  # what a core's cache holds
            codes = unpack_rows(self.packed[rows], self.bits, self.in_features)
            stored = codes.astype(np.float32)
            if self.minima is None:
                stored -= widened(self.zero_points[rows])
            stored *= widened(self.scales[rows])
            if self.minima is not None:
                stored += widened(self.minima[rows])
            weight[rows, slice(None) if self.permutation is None else self.permutation] = stored
        return weight


def row_blocks(rows: int, columns: int, elements: int = 1 << 20, multiple: int = 1) -> Iterator[slice]:
    """Slices that cover `rows` rows in order, each of about `elements` elements: bounds temporary memory.
    Each begins at a multiple of `multiple`."""
    step = max(1, elements // max(1, columns) // multiple) * multiple
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def pack_rows(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """[out, in] codes of 4 or 8 bits to [out, ceil(in * bits / 8)] bytes, low nibble first; a last odd
    nibble's partner is 0."""
    if bits == 8:
        return np.ascontiguousarray(codes)
    if codes.shape[1] % 2:
        codes = np.pad(codes, ((0, 0), (0, 1)))
    return codes[:, 0::2] | (codes[:, 1::2] << np.uint8(4))


def unpack_rows(packed: NDArray[np.uint8], bits: int, columns: int) -> NDArray[np.uint8]:
    """The inverse of `pack_rows`: [out, columns] uint8."""
    if bits == 8:
        return packed[:, :columns]
    codes = np.empty((packed.shape[0], packed.shape[1] * 2), np.uint8)
    codes[:, 0::2] = packed & 15
    codes[:, 1::2] = packed >> 4
    return codes[:, :columns]


def round_to_f16(weight: NDArray[np.float32] | NDArray[np.float16], name: str) -> NDArray[np.float16]:
    """`weight` in float16. Raises `QuantizationError` naming the tensor where a value is not finite or
    leaves float16's range (`LARGEST_F16`)."""
    with np.errstate(over="ignore"):
        half = weight.astype(np.float16, copy=False)
    for rows in row_blocks(half.shape[0], half[:1].size):
        if not np.isfinite(half[rows]).all():
            found = np.abs(weight[rows]).max()
            raise QuantizationError(
                f"{name}: holds {found}; expected finite values of at most {LARGEST_F16:.0f} (float16)"
            )
    return half


def quantize_head(
    weight: NDArray[np.float32] | NDArray[np.float16], name: str = "embedding or head"
) -> QuantizedTensor:
    """The one definition of an embedding or head [vocab, hidden]: rounded to f16 first (as the GPTQ half
    keeps it), then 8 bits, round to nearest (ties to even), symmetric, groups of 32, f16 scales.

    A group's scale is its largest magnitude / 127, rounded to f16, and raised to the next f16 where that
    rounding (coarse below 2⁻¹⁴) would cut the largest value by more than half a step. The integers are
    computed with the rounded scale. A group of zeros has the scale 1 and the code 128. Raises
    `QuantizationError` where a value is not finite or leaves float16's range.
    """
    out, columns = weight.shape
    half = round_to_f16(weight, name)
    groups = -(-columns // HEAD_GROUP_SIZE)
    packed = np.empty((out, columns), np.uint8)
    scales = np.empty((out, groups), np.float16)
    for rows in row_blocks(out, columns, 1 << 18):
        block = np.zeros((rows.stop - rows.start, groups * HEAD_GROUP_SIZE), np.float32)
        block[:, :columns] = half[rows]
        grouped = block.reshape(-1, groups, HEAD_GROUP_SIZE)
        largest = np.abs(grouped).max(axis=2)
        scale = (largest / np.float32(127)).astype(np.float16)
        short = scale.astype(np.float32) * np.float32(127.5) < largest
        scale = np.where(short, np.nextafter(scale, np.float16(np.inf)), scale)
        scale[largest == 0] = 1
        codes = np.rint(grouped / scale.astype(np.float32)[:, :, None])
        codes = np.clip(codes, -127, 127) + np.float32(128)
        packed[rows] = codes.reshape(len(block), -1)[:, :columns].astype(np.uint8)
        scales[rows] = scale
    return QuantizedTensor(packed, scales, None, HEAD_BITS, HEAD_GROUP_SIZE, columns)


CheckpointFormat = Literal["gptq", "gptq_v2"]


def to_gptq(tensor: QuantizedTensor, checkpoint_format: CheckpointFormat = "gptq") -> dict[str, NDArray[Any]]:
    """The AutoGPTQ layout of one linear layer (https://github.com/AutoGPTQ/AutoGPTQ), with 32 / bits codes
    in an int32, low bits first:

    - `qweight` int32 [ceil(in * bits / 32), out]: packed along the input, columns in the model's own order;
    - `qzeros` int32 [groups, ceil(out * bits / 32)]: packed along the output; "gptq" stores zero − 1;
    - `scales` float16 [groups, out];
    - `g_idx` int32 [in]: each column's group. Not in ascending order exactly for a permuted tensor.

    Where a size is not a multiple of 32 / bits, the last int32 is filled up with zero bits; `g_idx` and
    `scales` keep the true sizes. Raises `QuantizationError` for a zero point of 0 in "gptq", which that
    format cannot express.
    """
    bits, columns = tensor.bits, tensor.in_features
    g_idx = (np.arange(columns) // tensor.group_size).astype(np.int32)
    packed = tensor.packed
    if tensor.permutation is not None:
        packed = np.empty_like(tensor.packed)
        for rows in row_blocks(tensor.out_features, columns):
            stored = unpack_rows(tensor.packed[rows], bits, columns)
            codes = np.empty_like(stored)
            codes[:, tensor.permutation] = stored
            packed[rows] = pack_rows(codes, bits)
        stored_g_idx = g_idx
        g_idx = np.empty_like(stored_g_idx)
        g_idx[tensor.permutation] = stored_g_idx
    zeros = tensor.zero_points
    if checkpoint_format == "gptq":
        if not zeros.all():
            raise QuantizationError(
                "a zero point is 0; the gptq checkpoint format holds 1 and up: use gptq_v2"
            )
        zeros = zeros - np.uint8(1)
    return {
        "qweight": np.ascontiguousarray(_words(packed).T),
        "qzeros": _words(pack_rows(zeros.T, bits)),
        "scales": np.ascontiguousarray(tensor.scales.T),
        "g_idx": g_idx,
    }


def from_gptq(
    qweight: NDArray[Any],
    qzeros: NDArray[Any],
    scales: NDArray[Any],
    g_idx: NDArray[Any] | None,
    *,
    bits: int,
    group_size: int,
    checkpoint_format: CheckpointFormat = "gptq",
    in_features: int | None = None,
    name: str = "tensor",
) -> QuantizedTensor:
    """The inverse of `to_gptq`, for our files and others'. `group_size` may be −1.

    Without `g_idx` the groups are sequential, and `in_features` (default: as many as `qweight` holds) gives
    the columns. A `g_idx` that is not sequential becomes a permutation: columns sorted by group, in their
    own order inside one; the one short group, if any, goes last. The zero points decide whether the tensor
    is symmetric. Raises `ModelFormatError` naming `name` for dtypes or shapes that contradict each other, a
    group out of range, and groups of unequal sizes.
    """

    def check(ok: bool, what: str, found: object, expected: object) -> None:
        if not ok:
            raise ModelFormatError(f"{name}: {what} is {found}; expected {expected}")

    check(bits in (4, 8), "bits", bits, "4 or 8")
    check(group_size == -1 or group_size > 0, "group_size", group_size, "-1 or a positive size")
    check(checkpoint_format in ("gptq", "gptq_v2"), "checkpoint_format", checkpoint_format, "gptq or gptq_v2")
    parts = {"qweight": (qweight, np.int32), "qzeros": (qzeros, np.int32), "scales": (scales, np.float16)}
    for part, (array, dtype) in parts.items():
        check(array.dtype == dtype, f"dtype of {part}", array.dtype, np.dtype(dtype))
        check(array.ndim == 2, f"shape of {part}", list(array.shape), "two dimensions")
    per_word = 32 // bits
    if g_idx is not None:
        check(
            g_idx.ndim == 1 and g_idx.dtype == np.int32, "g_idx", f"{g_idx.dtype} {g_idx.shape}", "int32 [in]"
        )
        check(in_features in (None, g_idx.size), "length of g_idx", g_idx.size, in_features)
        in_features = int(g_idx.size)
    columns = qweight.shape[0] * per_word if in_features is None else in_features
    check(columns > 0, "input size", columns, "at least 1")
    groups, out = scales.shape
    size = columns if group_size == -1 else group_size
    check(groups == -(-columns // size), "number of groups of scales", groups, -(-columns // size))
    check(qweight.shape == (-(-columns // per_word), out), "shape of qweight", list(qweight.shape),
          [-(-columns // per_word), out])  # fmt: skip
    check(qzeros.shape == (groups, -(-out // per_word)), "shape of qzeros", list(qzeros.shape),
          [groups, -(-out // per_word)])  # fmt: skip
    check(bool(np.isfinite(scales).all()), "a scale", "infinite or NaN", "finite scales")

    packed = _bytes(qweight.T, bits, columns)
    zeros = gptq_zeros(qzeros, out, bits, checkpoint_format)
    own_scales = np.ascontiguousarray(scales.T)
    permutation = None
    if g_idx is not None and not np.array_equal(g_idx, np.arange(columns) // size):
        permutation, order = _group_order(g_idx, groups, size, check)
        zeros, own_scales = zeros[:, order], own_scales[:, order]
        for rows in row_blocks(out, columns):
            packed[rows] = pack_rows(unpack_rows(packed[rows], bits, columns)[:, permutation], bits)
    symmetric = bool((zeros == 1 << (bits - 1)).all())
    return QuantizedTensor(packed, own_scales, None if symmetric else zeros, bits, size, columns, permutation)


def gptq_zeros(
    qzeros: NDArray[Any], out: int, bits: int, checkpoint_format: CheckpointFormat
) -> NDArray[np.uint8]:
    """The zero points [out, groups] in a checkpoint's `qzeros`."""
    zeros = unpack_rows(_bytes(qzeros, bits, out), bits, out)
    if checkpoint_format == "gptq":
        zeros = (zeros + np.uint8(1)) & np.uint8((1 << bits) - 1)
    return np.ascontiguousarray(zeros.T)


def _group_order(
    g_idx: NDArray[Any], groups: int, size: int, check: Callable[[bool, str, object, object], None]
) -> tuple[NDArray[np.int32], NDArray[np.intp]]:
    """For a `g_idx` that is not sequential: the permutation of the columns, and the order of the groups
    (ascending, but for the short one, which goes last)."""
    low, high = int(g_idx.min()), int(g_idx.max())
    check(low >= 0 and high < groups, "a group in g_idx", low if low < 0 else high, f"0 to {groups - 1}")
    counts = np.bincount(g_idx, minlength=groups)
    order = np.argsort(counts != size, kind="stable")
    uneven = np.flatnonzero(counts[order[:-1]] != size)
    check(
        uneven.size == 0,
        "a group's number of columns in g_idx",
        counts[order[uneven[0]]] if uneven.size else size,
        f"{size} in all but one group",
    )
    rank = np.empty(groups, np.int64)
    rank[order] = np.arange(groups)
    return np.argsort(rank[g_idx], kind="stable").astype(np.int32), order


def _words(packed: NDArray[np.uint8]) -> NDArray[np.int32]:
    """Rows of bytes as little-endian int32, the last one filled up with zero bits."""
    padded = np.zeros((packed.shape[0], -(-packed.shape[1] // 4) * 4), np.uint8)
    padded[:, : packed.shape[1]] = packed
    return padded.view("<i4").astype(np.int32, copy=False)


def _bytes(words: NDArray[Any], bits: int, columns: int) -> NDArray[np.uint8]:
    """The inverse of `_words`, a new array: rows of `columns` codes; bits past the last code are cleared."""
    packed = np.array(words, "<i4", order="C").view(np.uint8)
    width = -(-columns * bits // 8)
    packed = packed if packed.shape[1] == width else packed[:, :width].copy()
    if bits == 4 and columns % 2:
        packed[:, -1] &= 15
    return packed


def matmulnbits_block(group_size: int, in_features: int) -> int:
    """The block size under which a tensor is written as ONNX's `MatMulNBits`: 32, or 16 where 32 does not
    divide the group size. A larger group's scale is repeated, once for each of its blocks.

    Blocks of 32 because a block is also what `accuracy_level` 4 rounds activations in: the error is smaller
    than with 64 or 128, and ONNX Runtime's kernels for one row and for many then give the same bits, so
    that a token's logits do not depend on how many run beside it. Raises `ModelFormatError` for a group size
    that is no multiple of 16.
    """
    if group_size >= in_features:
        return 16 if in_features <= 16 else 32
    block = min(32, group_size & -group_size)
    if block < 16:
        raise ModelFormatError(f"group size {group_size} cannot be written as MatMulNBits: no multiple of 16")
    return block


def to_matmulnbits(
    tensor: QuantizedTensor,
) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.uint8] | None]:
    """`(B, scales, zero_points)` of ONNX Runtime's `com.microsoft.MatMulNBits`, with
    `block = matmulnbits_block(group_size, in_features)` and `blocks = ceil(in / block)`:

    - `B` uint8 [out, blocks, block * bits / 8], low nibble first, filled up with the zero point's code;
    - `scales` float32 [out, blocks];
    - `zero_points` uint8 [out, ceil(blocks * bits / 8)], packed like a row; None for a symmetric tensor.

    Columns are in stored order: a permuted tensor needs `permutation` applied to the activations.
    """
    bits, columns = tensor.bits, tensor.in_features
    block = matmulnbits_block(tensor.group_size, columns)
    blocks = -(-columns // block)
    group = np.arange(blocks) * block // tensor.group_size
    fill = tensor.zero_points[:, -1]
    if bits == 4:
        fill = fill | (fill << np.uint8(4))
    b = np.empty((tensor.out_features, blocks * block * bits // 8), np.uint8)
    width = tensor.packed.shape[1]
    b[:, :width] = tensor.packed
    if bits == 4 and columns % 2:
        b[:, width - 1] |= fill & 0xF0
    b[:, width:] = fill[:, None]
    zero_points = None if tensor.zeros is None else pack_rows(tensor.zeros[:, group], bits)
    return b.reshape(len(b), blocks, -1), tensor.scales[:, group].astype(np.float32), zero_points


def from_matmulnbits(
    b: NDArray[np.uint8],
    scales: NDArray[np.float32],
    zero_points: NDArray[np.uint8] | None,
    *,
    bits: int,
    in_features: int,
    group_size: int,
    permutation: NDArray[np.int32] | None = None,
    name: str = "tensor",
) -> QuantizedTensor:
    """The inverse of `to_matmulnbits`; `group_size` may be −1. Raises `ModelFormatError` naming `name` where
    shapes contradict each other, blocks of one group differ, or a scale is no float16."""

    def check(ok: bool, what: str, found: object, expected: object) -> None:
        if not ok:
            raise ModelFormatError(f"{name}: {what} is {found}; expected {expected}")

    check(bits in (4, 8), "bits", bits, "4 or 8")
    check(in_features > 0, "input size", in_features, "at least 1")
    check(group_size == -1 or group_size > 0, "group_size", group_size, "-1 or a positive size")
    size = in_features if group_size == -1 else group_size
    block = matmulnbits_block(size, in_features)
    blocks, out = -(-in_features // block), b.shape[0]
    check(b.dtype == np.uint8 and b.shape == (out, blocks, block * bits // 8), "B",
          f"{b.dtype} {list(b.shape)}", f"uint8 [out, {blocks}, {block * bits // 8}]")  # fmt: skip
    check(scales.shape == (out, blocks), "shape of scales", list(scales.shape), [out, blocks])
    first = np.arange(0, in_features, size) // block
    group = np.arange(blocks) * block // size
    with np.errstate(over="ignore"):
        half = scales[:, first].astype(np.float16)
    check(bool((half[:, group] == scales).all()), "a group's scale",
          "not one float16 number", "the same float16 number in each of its blocks")  # fmt: skip
    zeros = None
    if zero_points is not None:
        zero_shape = (out, -(-blocks * bits // 8))
        check(zero_points.dtype == np.uint8 and zero_points.shape == zero_shape, "zero_points",
              f"{zero_points.dtype} {list(zero_points.shape)}", f"uint8 {list(zero_shape)}")  # fmt: skip
        repeated = unpack_rows(zero_points, bits, blocks)
        zeros = np.ascontiguousarray(repeated[:, first])
        check(np.array_equal(zeros[:, group], repeated), "a group's zero point", "not one number",
              "the same number in each of its blocks")  # fmt: skip
    packed = b.reshape(out, -1)[:, : -(-in_features * bits // 8)].copy()
    if bits == 4 and in_features % 2:
        packed[:, -1] &= 15
    return QuantizedTensor(packed, half, zeros, bits, size, in_features, permutation)
