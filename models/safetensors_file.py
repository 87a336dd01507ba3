"""The safetensors format, read with bounds: https://huggingface.co/docs/safetensors (the format's page).

Eight bytes (little-endian) give the header's length; the header is a JSON object from tensor name to
`dtype`, `shape` and `data_offsets` into what follows. Everything is checked against the file's size before a
tensor is read. Tensors are read, not mapped: mapped pages would count as this process's memory.
"""

import math
import os
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelFormatError, UnsupportedModelError
from ..records import dataclass
from .config_reader import parse_json_object, regular_file_size, shown

# A tensor takes about 120 bytes of header, so this has room for 60,000; parsing it takes up to some twenty
# times as much memory.
MAX_HEADER_BYTES = 8 << 20
MAX_DIMENSIONS = 8
READ_BYTES = 1 << 30  # Linux reads at most 2 GiB at once

ITEM_SIZES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
}
# BF16 has no numpy type; `raw` gives its bits.
NUMPY_TYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "u1",
    "BOOL": "?",
}


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies in its file."""

    dtype: str  # the format's name: F32, F16, BF16, I32, ...
    shape: tuple[int, ...]
    offset: int  # bytes from the file's beginning
    size: int  # bytes


class SafetensorsFile:
    """An opened file whose header has been checked. Tensors are read when asked for and not kept."""

    def __init__(self, path: Path, where: str | None = None) -> None:
        """`where` names the file in messages. Raises `ModelFormatError`."""
        self.path = path
        self.where = str(path) if where is None else where
        size = regular_file_size(path, self.where)
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ModelFormatError(f"{self.where}: cannot be opened: {error.strerror}") from error
        try:
            self._tensors = self._read_header(size)
        except BaseException:
            self.close()
            raise

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """Every tensor by name, in the order of their data."""
        return self._tensors

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> "SafetensorsFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def raw(self, name: str, rows: tuple[int, int] | None = None) -> NDArray[Any]:
        """A tensor as stored, in the numpy type of the same name; BF16 as the uint16 of its bits. With `rows`
        (begin, end), which must lie in it, only these of its first dimension. Raises `ModelFormatError`, and
        `UnsupportedModelError` for a type that numpy lacks (8-bit floats)."""
        info = self._info(name)
        shape, offset = info.shape, info.offset
        if rows is not None:
            begin, end = rows
            offset += begin * (info.size // shape[0])
            shape = (end - begin, *shape[1:])
        array = np.empty(shape, self._numpy_type(name, info))
        self._read_into(array.reshape(-1).view(np.uint8).data, offset)
        return array

    def columns(self, name: str, begin: int, end: int) -> NDArray[Any]:
        """Columns begin to end of a tensor of two dimensions, which must lie in it; as `raw` does."""
        info = self._info(name)
        rows, width = info.shape
        array = np.empty((rows, end - begin), self._numpy_type(name, info))
        buffer, row_bytes = array.reshape(-1).view(np.uint8).data, (end - begin) * array.itemsize
        for row in range(rows):
            part = buffer[row * row_bytes : (row + 1) * row_bytes]
            self._read_into(part, info.offset + (row * width + begin) * array.itemsize)
        return array

    def float32(self, name: str, rows: tuple[int, int] | None = None) -> NDArray[np.float32]:
        """An F32, F16 or BF16 tensor, or rows of it, as float32, exactly. Raises `ModelFormatError`, and
        `UnsupportedModelError` for another type."""
        info = self._info(name)
        if info.dtype not in ("F32", "F16", "BF16"):
            raise UnsupportedModelError(
                f"{self.where}: tensor {shown(name)} is {info.dtype}, expected F32, F16 or BF16"
            )
        array = self.raw(name, rows)
        if info.dtype == "BF16":
            # bfloat16 is the upper half of a float32.
            bits = array.astype(np.uint32)
            bits <<= 16
            return bits.view(np.float32)
        return array.astype(np.float32, copy=False)

    def _numpy_type(self, name: str, info: TensorInfo) -> str:
        if info.dtype not in NUMPY_TYPES:
            raise UnsupportedModelError(
                f"{self.where}: tensor {shown(name)} is {info.dtype}, which numpy cannot hold"
            )
        return NUMPY_TYPES[info.dtype]

    def _info(self, name: str) -> TensorInfo:
        info = self._tensors.get(name)
        if info is None:
            raise ModelFormatError(f"{self.where}: tensor {shown(name)} is missing")
        return info

    def _read_into(self, buffer: memoryview, offset: int) -> None:
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self._file, [buffer[done : done + READ_BYTES]], offset + done)
            except OSError as error:
                raise ModelFormatError(f"{self.where}: cannot be read: {error.strerror}") from error
            if count == 0:
                raise ModelFormatError(f"{self.where}: truncated: ends at byte {offset + done}")
            done += count

    def _read_header(self, file_size: int) -> dict[str, TensorInfo]:
        if file_size < 8:
            raise ModelFormatError(
                f"{self.where}: truncated: {file_size} bytes, too short for a safetensors file"
            )
        prefix = bytearray(8)
        self._read_into(memoryview(prefix), 0)
        length = int.from_bytes(prefix, "little")
        if length > MAX_HEADER_BYTES:
            raise ModelFormatError(
                f"{self.where}: a header of {length} bytes, expected at most {MAX_HEADER_BYTES}"
            )
        if length > file_size - 8:
            raise ModelFormatError(
                f"{self.where}: truncated: a header of {length} bytes, but only {file_size - 8} follow"
            )
        header = bytearray(length)
        self._read_into(memoryview(header), 8)
        entries = parse_json_object(bytes(header), f"{self.where}: header")
        entries.pop("__metadata__", None)
        start = 8 + length
        tensors = [(name, self._entry(name, entry, start, file_size)) for name, entry in entries.items()]
        tensors.sort(key=lambda item: (item[1].offset, item[1].size))
        end, before = start, "the header"
        for name, info in tensors:
            if info.offset != end:
                kind = "overlaps" if info.offset < end else "leaves a gap after"
                raise ModelFormatError(f"{self.where}: tensor {shown(name)} {kind} {before}")
            end, before = info.offset + info.size, f"tensor {shown(name)}"
        if end != file_size:
            raise ModelFormatError(f"{self.where}: {file_size - end} bytes after the last tensor")
        return dict(tensors)

    def _entry(self, name: str, entry: Any, start: int, file_size: int) -> TensorInfo:
        def wrong(what: str, found: object, expected: str) -> ModelFormatError:
            return ModelFormatError(
                f"{self.where}: tensor {shown(name)}: {what} is {shown(found)}, expected {expected}"
            )

        if not isinstance(entry, dict):
            raise wrong("its entry", entry, "an object")
        dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
        if not isinstance(dtype, str) or dtype not in ITEM_SIZES:
            raise wrong("dtype", dtype, f"one of {', '.join(ITEM_SIZES)}")
        if not _is_size_list(shape) or len(shape) > MAX_DIMENSIONS:
            raise wrong("shape", shape, f"a list of at most {MAX_DIMENSIONS} sizes")
        if not _is_size_list(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise wrong("data_offsets", offsets, "a list of two ascending offsets")
        size = math.prod(shape) * ITEM_SIZES[dtype]
        if offsets[1] - offsets[0] != size:
            raise wrong("data_offsets", offsets, f"{shown(size)} bytes for {dtype} {shown(shape)}")
        if start + offsets[1] > file_size:
            raise ModelFormatError(
                f"{self.where}: truncated: tensor {shown(name)} ends at byte {start + offsets[1]}, "
                f"the file at {file_size}"
            )
        return TensorInfo(dtype, tuple(shape), start + offsets[0], size)


def _is_size_list(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        # Bounded, so that no product of them is a number of thousands of digits.
        isinstance(size, int) and not isinstance(size, bool) and 0 <= size < 2**63
        for size in value
    )
