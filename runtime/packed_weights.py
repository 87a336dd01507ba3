"""Weights as the CPU kernels read them: tiles of 16 output rows by 32 inputs (`kernels/layout.h`)."""

from collections.abc import Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import UnsupportedModelError
from ..export.weights import LogicalWeights
from ..models.spec import ModelSpec
from ..quant.packing import row_blocks, unpack_rows
from ..quant.packing_ggml import GgmlType
from ..quant.packing_nf4 import AnyQuantized, Nf4Tensor
from ..quant.packing_rows import PIECE_ELEMENTS, ROW_STEP, MatrixKind, MatrixRows
from ..records import dataclass

# Raised whenever the same weights would become other bytes: files of packed weights are then made again.
LAYOUT_VERSION = 4
TILE_ROWS = 16
BLOCK_TILES = 4  # rows of tiles whose halves lie together, of kind HALVES
BLOCK_ROWS = BLOCK_TILES * TILE_ROWS
SLICE = 32
SYMMETRIC, ZERO_POINT, MINIMUM, NF4, HALVES = range(5)
KINDS: dict[MatrixKind, int] = {"symmetric": SYMMETRIC, "zeros": ZERO_POINT, "minima": MINIMUM, "nf4": NF4}
# Of a code, by kind.
KIND_BITS = {SYMMETRIC: (4, 8), ZERO_POINT: (4, 8), MINIMUM: (4,), NF4: (4,), HALVES: (8,)}


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
    def block_bytes(self) -> int:
        """Bytes of the 64 rows, or of all where there are fewer, that lie together in kind HALVES."""
        tiles = -(-self.rows // TILE_ROWS)
        return self.tiles.nbytes // tiles * min(BLOCK_TILES, tiles)


class Packing:
    """How one linear layer is packed: the form of its tiles, and the tiles a few at a time. Rows are padded
    to whole tiles with zero weights, inputs to whole slices.

    A tensor has one packed form, whichever half of an artifact it is read from: columns of a group ascend,
    which the halves keep or not, and zero points that are all in the middle are left out.
    """

    def __init__(self, matrix: MatrixRows, name: str = "tensor", halves: bool = False) -> None:
        """With `halves` those of 8-bit symmetric codes are packed apart, as embedding and head have them.

        Raises `UnsupportedModelError` naming `name` for minima with 8 bits, for halves of anything else, and
        for a group size that is no multiple of 32, short of one group a row: the activations' scales, too,
        are for 32 inputs each."""
        self._matrix = matrix
        self.rows, self.columns, self.bits = matrix.rows, matrix.columns, matrix.bits
        self.kind, slices = KINDS[matrix.kind], -(-matrix.columns // SLICE)
        if halves:
            if self.bits != 8 or self.kind != SYMMETRIC or matrix.permutation is not None:
                raise UnsupportedModelError(f"{name} is not 8-bit symmetric, as embedding and head are")
            self.kind = HALVES
        if matrix.group_size < matrix.columns and matrix.group_size % SLICE:
            raise UnsupportedModelError(
                f"{name} has groups of {matrix.group_size} inputs; executor 'cpu' has groups of a multiple "
                f"of {SLICE}, or one a row; try executor 'ort'"
            )
        if self.bits not in KIND_BITS[self.kind]:
            raise UnsupportedModelError(
                f"{name} has minima with {self.bits} bits; executor 'cpu' has minima with 4 bits"
            )
        whole = matrix.group_size >= matrix.columns
        self.slices_per_group = slices if whole else matrix.group_size // SLICE
        self._order, self.permutation = _column_order(matrix)

    @property
    def nbytes(self) -> int:
        """Of all tiles."""
        return tiles_bytes(self.rows, self.columns, self.bits, self.kind, self.slices_per_group)

    def pieces(self) -> Iterator[NDArray[np.uint8]]:
        """The tiles in order, [bytes] a piece. Raises what reading the weight raises."""
        matrix, step = self._matrix, BLOCK_ROWS if self.kind == HALVES else ROW_STEP
        for rows in row_blocks(self.rows, self.columns, PIECE_ELEMENTS, step):
            yield self._tiles(matrix.read(rows.start, rows.stop))

    def packed(self) -> PackedLinear:
        """All of them in memory."""
        tiles, at = np.empty(self.nbytes, np.uint8), 0
        for piece in self.pieces():
            tiles[at : at + len(piece)] = piece
            at += len(piece)
        return PackedLinear(
            tiles, self.rows, self.columns, self.bits, self.kind, self.slices_per_group, self.permutation
        )

    def _tiles(self, part: AnyQuantized) -> NDArray[np.uint8]:
        tiles, slices = -(-part.out_features // TILE_ROWS), -(-self.columns // SLICE)
        in_header, slice_bytes = header_bytes(self.kind, self.bits), TILE_ROWS * SLICE * self.bits // 8
        codes = unpack_rows(part.packed, self.bits, self.columns)
        if self.kind == HALVES:
            slice_bytes //= 2
            body = _slices(codes >> np.uint8(4), tiles, slices, 4)
        else:
            body = _slices(codes if self._order is None else codes[:, self._order], tiles, slices, self.bits)
        packed = np.empty((tiles, part.groups * in_header + slices * slice_bytes), np.uint8)
        headers = _headers(part, self.kind, self.bits, tiles)
        at, per_group = 0, self.slices_per_group
        for group in range(part.groups):
            packed[:, at : at + in_header] = headers[:, group]
            at += in_header
            values = body[:, group * per_group : (group + 1) * per_group].reshape(tiles, -1)
            packed[:, at : at + values.shape[1]] = values
            at += values.shape[1]
        if self.kind == HALVES:
            return _in_blocks(packed, _slices(codes & np.uint8(15), tiles, slices, 4).reshape(tiles, -1))
        return packed.reshape(-1)


class PackedSource(Protocol):
    """A model's tensors by their Hugging Face names, as the kernels read them."""

    @property
    def spec(self) -> ModelSpec: ...

    def linear(self, name: str) -> PackedLinear: ...

    def vector(self, name: str) -> NDArray[np.float32]: ...


class PackingSource(Protocol):
    """A model's tensors by their Hugging Face names, to be packed piece by piece."""

    @property
    def spec(self) -> ModelSpec: ...

    def packing(self, name: str) -> Packing: ...

    def vector(self, name: str) -> NDArray[np.float32]: ...


class FreshlyPacked:
    """`PackedSource` and `PackingSource` over logical weights: each tensor is read and packed when it is
    asked for, and none is kept."""

    def __init__(self, weights: LogicalWeights) -> None:
        self._weights = weights

    @property
    def spec(self) -> ModelSpec:
        return self._weights.spec

    def linear(self, name: str) -> PackedLinear:
        """Raises as `packing` does."""
        return self.packing(name).packed()

    def packing(self, name: str) -> Packing:
        """Raises `UnsupportedModelError` for a tensor that is not quantized, or that no tile expresses."""
        matrix = self._weights.matrix(name)
        if matrix is None:
            raise UnsupportedModelError(
                f"tensor {name} is not quantized; executor 'cpu' runs quantized models only"
            )
        return Packing(
            matrix, f"tensor {name}", halves=name in (self.spec.embedding_name, self.spec.head_name)
        )

    def vector(self, name: str) -> NDArray[np.float32]:
        """A norm's weight or a bias, [n] float32; a router's or gate's rows one after the other."""
        tensor = self._weights.tensor(name)
        assert isinstance(tensor, np.ndarray)  # the model says which are vectors
        return np.ascontiguousarray(tensor, np.float32).reshape(-1)


def header_bytes(kind: int, bits: int) -> int:
    """Bytes before the slices of each group of a tile: 16 f16 scales, and zero points or f16 minima."""
    more = {ZERO_POINT: TILE_ROWS * bits // 8, MINIMUM: TILE_ROWS * 2}
    return TILE_ROWS * 2 + more.get(kind, 0)


def tiles_bytes(rows: int, columns: int, bits: int, kind: int, slices_per_group: int) -> int:
    """Bytes of one linear layer's tiles."""
    slices = -(-columns // SLICE)
    groups = -(-slices // slices_per_group)
    tile = groups * header_bytes(kind, bits) + slices * (TILE_ROWS * SLICE * bits // 8)
    return -(-rows // TILE_ROWS) * tile


def ggml_tiles_bytes(rows: int, columns: int, kind: GgmlType) -> int:
    """Bytes of the tiles of a matrix that keeps the bits of a ggml type."""
    bits = 8 if kind == "Q8_0" else 4
    return tiles_bytes(rows, columns, bits, MINIMUM if kind == "Q4_1" else SYMMETRIC, 1)


def pack(tensor: AnyQuantized, name: str = "tensor", halves: bool = False) -> PackedLinear:
    """A quantized weight in memory, packed. Raises as `Packing` does."""
    return Packing(MatrixRows.of(tensor), name, halves).packed()


def _headers(part: AnyQuantized, kind: int, bits: int, tiles: int) -> NDArray[np.uint8]:
    """Of each tile and group, [tiles, groups, bytes]."""
    lanes = [_lanes(values, tiles) for values in _header(part, kind)]
    if kind == ZERO_POINT and bits == 4:
        first, second = np.split(lanes[1], 2, axis=2)
        lanes[1] = first | second << np.uint8(4)
    return np.concatenate(lanes, axis=2)


def _header(part: AnyQuantized, kind: int) -> tuple[NDArray[np.generic], ...]:
    """What a header holds of each row and group, in order: arrays [rows, groups]."""
    if isinstance(part, Nf4Tensor) or kind in (SYMMETRIC, HALVES):
        return (part.scales,)
    if part.minima is not None:
        return part.scales, part.minima
    return part.scales, part.zero_points


def _column_order(matrix: MatrixRows) -> tuple[NDArray[np.intp] | None, NDArray[np.int32] | None]:
    """How stored columns are packed, and the permutation that they then have; None is as they are."""
    if matrix.permutation is None:
        return None, None
    group = np.arange(matrix.columns) // matrix.group_size
    order = np.lexsort((matrix.permutation, group))
    permutation = matrix.permutation[order]
    if np.array_equal(permutation, np.arange(matrix.columns)):
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


def _in_blocks(upper: NDArray[np.uint8], lower: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Four rows of tiles of the upper halves, [tiles, bytes], then those of the lower ones, and so on."""
    parts = []
    for begin in range(0, len(upper), BLOCK_TILES):
        parts += [upper[begin : begin + BLOCK_TILES], lower[begin : begin + BLOCK_TILES]]
    return np.concatenate([part.reshape(-1) for part in parts])


def _lanes(values: NDArray[np.generic], tiles: int) -> NDArray[np.uint8]:
    """A value for each row and group, [rows, groups], as bytes by tile and group: [tiles, groups, bytes]."""
    padded = np.zeros((tiles * TILE_ROWS, values.shape[1]), values.dtype)
    padded[: values.shape[0]] = values
    lanes = padded.reshape(tiles, TILE_ROWS, -1).transpose(0, 2, 1)
    return np.ascontiguousarray(lanes).view(np.uint8)
