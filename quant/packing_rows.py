"""`MatrixRows`: a quantized weight that is read some rows at a time, and never whole."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..errors import QuantizationError
from ..records import dataclass
from .packing import HEAD_BITS, HEAD_GROUP_SIZE, QuantizedTensor, row_blocks
from .packing_nf4 import AnyQuantized, Nf4Tensor

# A range of rows begins at a multiple of this: what the kernels' tiles and GPTQ's words of zero points hold
# together, 32 of them in three words of 3 bits, is not cut.
ROW_STEP = 32
# Of a piece: what is made of them takes some ten bytes each.
PIECE_ELEMENTS = 1 << 20

# What a weight has besides its codes and scales.
MatrixKind = Literal["symmetric", "zeros", "minima", "nf4"]


@dataclass(frozen=True, eq=False)
class MatrixRows:
    """A weight [rows, columns]: what its rows have in common, and how to read some of them.

    `read(begin, end)` is rows begin to end as a tensor of their own; `begin` is a multiple of `ROW_STEP`, and
    `end` is one or that of all rows. A part of a matrix of kind "zeros" may be symmetric; its `zero_points`
    are right in any case.
    """

    rows: int
    columns: int
    bits: int
    group_size: int  # resolved, as `QuantizedTensor` has it
    kind: MatrixKind
    permutation: NDArray[np.int32] | None
    read: Callable[[int, int], AnyQuantized]

    @classmethod
    def of(cls, tensor: AnyQuantized) -> "MatrixRows":
        """The rows of a tensor in memory."""

        def read(begin: int, end: int) -> AnyQuantized:
            return _part(tensor, slice(begin, end))

        return cls(
            tensor.out_features, tensor.in_features, tensor.bits, tensor.group_size, _kind(tensor),
            tensor.permutation, read,
        )  # fmt: skip

    @classmethod
    def of_head(cls, shape: tuple[int, ...], read: Callable[[int, int], QuantizedTensor]) -> "MatrixRows":
        """An embedding or head [vocab, hidden] in the form of `quantize_head`."""
        vocab, hidden = shape
        return cls(vocab, hidden, HEAD_BITS, HEAD_GROUP_SIZE, "symmetric", None, read)

    def part(self, begin: int, end: int) -> "MatrixRows":
        """Rows begin to end, any of them, as a matrix of their own."""
        if (begin, end) == (0, self.rows):
            return self

        def read(first: int, last: int) -> AnyQuantized:
            # Between multiples of the step, a word may hold rows of two parts.
            low = (begin + first) // ROW_STEP * ROW_STEP
            high = min(self.rows, -(-(begin + last) // ROW_STEP) * ROW_STEP)
            tensor = self.read(low, high)
            wanted = slice(begin + first - low, begin + last - low)
            return tensor if wanted == slice(0, high - low) else _part(tensor, wanted)

        return replace(self, rows=end - begin, read=read)

    def pieces(self) -> Iterator[tuple[slice, AnyQuantized]]:
        """All rows in order, a few megabytes at a time."""
        for rows in row_blocks(self.rows, self.columns, PIECE_ELEMENTS, ROW_STEP):
            yield rows, self.read(rows.start, rows.stop)

    def whole(self) -> AnyQuantized:
        """The tensor in memory."""
        width, groups = -(-self.columns * self.bits // 8), -(-self.columns // self.group_size)
        packed = np.empty((self.rows, width), np.uint8)
        scales = np.empty((self.rows, groups), np.float16)
        zeros = np.empty((self.rows, groups), np.uint8) if self.kind == "zeros" else None
        minima = np.empty((self.rows, groups), np.float16) if self.kind == "minima" else None
        for rows, part in self.pieces():
            packed[rows], scales[rows] = part.packed, part.scales
            if isinstance(part, QuantizedTensor):
                if zeros is not None:
                    zeros[rows] = part.zero_points
                if minima is not None:
                    minima[rows] = part.minima
        if self.kind == "nf4":
            return Nf4Tensor(packed, scales, self.group_size, self.columns)
        return QuantizedTensor(
            packed, scales, zeros, self.bits, self.group_size, self.columns, self.permutation, minima
        )


def stacked(tensors: Sequence[QuantizedTensor]) -> QuantizedTensor:
    """The rows of tensors that share their input, one tensor after another. Raises `QuantizationError` where
    bits, group size or the order of columns differ, or one has minima."""
    first = tensors[0]
    if len(tensors) == 1:
        return first
    for other in tensors[1:]:
        for what in ("bits", "group_size", "in_features"):
            one, two = getattr(first, what), getattr(other, what)
            if one != two:
                raise QuantizationError(f"{what} is {one} and {two} in rows of one tensor; expected the same")
        if not _same_order(first.permutation, other.permutation):
            raise QuantizationError("the order of columns differs in rows of one tensor; expected the same")
    zeros = np.concatenate([tensor.zero_points for tensor in tensors])
    return QuantizedTensor(
        np.concatenate([tensor.packed for tensor in tensors]),
        np.concatenate([tensor.scales for tensor in tensors]),
        None if all(tensor.zeros is None for tensor in tensors) else zeros,
        first.bits,
        first.group_size,
        first.in_features,
        first.permutation,
    )


def _same_order(one: NDArray[np.int32] | None, other: NDArray[np.int32] | None) -> bool:
    if one is None or other is None:
        return one is other
    return np.array_equal(one, other)


def _kind(tensor: AnyQuantized) -> MatrixKind:
    """Zero points that are all in the middle are none."""
    if isinstance(tensor, Nf4Tensor):
        return "nf4"
    if tensor.minima is not None:
        return "minima"
    return "symmetric" if tensor.zeros is None or all_in_the_middle(tensor.zeros, tensor.bits) else "zeros"


def all_in_the_middle(zeros: NDArray[np.uint8], bits: int) -> bool:
    """Whether zero points are those of a symmetric tensor."""
    return bool((zeros == 1 << (bits - 1)).all())


def _part(tensor: AnyQuantized, rows: slice) -> AnyQuantized:
    if isinstance(tensor, Nf4Tensor):
        return Nf4Tensor(tensor.packed[rows], tensor.scales[rows], tensor.group_size, tensor.in_features)
    return QuantizedTensor(
        tensor.packed[rows],
        tensor.scales[rows],
        None if tensor.zeros is None else tensor.zeros[rows],
        tensor.bits,
        tensor.group_size,
        tensor.in_features,
        tensor.permutation,
        None if tensor.minima is None else tensor.minima[rows],
    )
