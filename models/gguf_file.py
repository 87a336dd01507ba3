"""The header of a GGUF file, read with every number checked before it is used.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little endian. The file
is read with `os.pread`, never mapped: mapped pages would count as resident memory.
"""

import os
import struct
from dataclasses import field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelFormatError, UnsupportedModelError
from ..records import dataclass

MAGIC = b"GGUF"
# A vocabulary of 256,000 tokens with its merges takes about 20 MB; nothing sound comes near this.
MAX_HEADER_BYTES = 64 << 20
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32
_CHUNK = 1 << 20
_U64 = struct.Struct("<Q").unpack_from

_STRING, _ARRAY = 8, 9
# Value type to numpy's little-endian dtype, in the order of the format: the scalars.
_SCALARS: dict[int, np.dtype[Any]] = {
    code: np.dtype(name)
    for code, name in {
        0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4",
        6: "<f4", 7: "|b1", 10: "<u8", 11: "<i8", 12: "<f8",
    }.items()
}  # fmt: skip


class BlockType(NamedTuple):
    """A ggml tensor type: elements and bytes of one block."""

    name: str
    elements: int
    nbytes: int


BLOCK_TYPES = {
    code: BlockType(*row)
    for code, row in {
        0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 28: ("F64", 1, 8),
        24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8),
        2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24),
        8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 20: ("IQ4_NL", 32, 18), 39: ("MXFP4", 32, 17),
        10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
        14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
        16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
        21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56),
        34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    }.items()
}  # fmt: skip


@dataclass(frozen=True)
class GgufTensor:
    """Where one tensor lies. `shape` is in numpy's order: the format's dimensions reversed."""

    name: str
    shape: tuple[int, ...]
    type: BlockType
    offset: int  # bytes, from the file's start
    nbytes: int


class StringArray:
    """An array of strings as it lies in the file, decoded when it is asked for: a vocabulary takes longer
    than all else in a header. `what` names it in messages of the file `where`."""

    def __init__(self, count: int, raw: bytes, where: str, what: str) -> None:
        self._count, self._raw, self._where, self._what = count, raw, where, what

    def __len__(self) -> int:
        return self._count

    def decoded(self) -> list[str]:
        """The strings. Raises `ModelFormatError` for one that is not UTF-8."""
        raw, at, found = self._raw, 0, list[str]()
        append, length_at = found.append, _U64
        try:
            for _ in range(self._count):
                end = at + 8 + length_at(raw, at)[0]
                append(raw[at + 8 : end].decode())
                at = end
        except UnicodeDecodeError:
            raise _not_utf8(self._where, self._what, raw[at + 8 : end]) from None
        return found


@dataclass(frozen=True)
class GgufHeader:
    """Metadata values are int, float, bool, str, `StringArray`, or a numpy array of numbers. `nbytes` are the
    file's bytes before the tensors."""

    version: int
    nbytes: int
    metadata: dict[str, Any] = field(repr=False)
    tensors: dict[str, GgufTensor] = field(repr=False)


def read_header(fd: int, where: str) -> GgufHeader:
    """The header of the open file `fd`; `where` names the file in messages.

    Raises `ModelFormatError` for a damaged file, `UnsupportedModelError` for a version, byte order or tensor
    type that is not read.
    """
    size = os.fstat(fd).st_size
    cursor = _Cursor(fd, size, where)
    version, tensor_count, value_count = _prologue(cursor)
    metadata: dict[str, Any] = {}
    for _ in range(value_count):
        key = cursor.string("a metadata key")
        if not key or key in metadata:
            raise cursor.error(f"metadata key {key[:64]!r} is {'repeated' if key else 'empty'}")
        metadata[key] = _value(cursor, key)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
        raise cursor.error(f"general.alignment is {_short(alignment)}; expected a power of two")
    entries = [_tensor_entry(cursor, alignment) for _ in range(tensor_count)]
    start = -(-cursor.position // alignment) * alignment
    return GgufHeader(version, start, metadata, _place(entries, start, size, where))


def read_bytes(fd: int, offset: int, out: NDArray[Any], where: str) -> None:
    """Fill `out`, contiguous, with the file's bytes from `offset`. Raises `ModelFormatError` when the file
    ends first."""
    view = out.data.cast("B")
    done = 0
    while done < len(view):
        try:
            got = os.preadv(fd, [view[done:]], offset + done)
        except OSError as error:
            raise ModelFormatError(f"{where}: cannot be read: {error.strerror}") from error
        if got == 0:
            raise ModelFormatError(
                f"{where}: ends at byte {offset + done}, inside a tensor; was it cut short?"
            )
        done += got


def _prologue(cursor: "_Cursor") -> tuple[int, int, int]:
    """Version, number of tensors, number of metadata values."""
    magic = cursor.take(4, "the magic")
    if magic != MAGIC:
        raise cursor.error(f"begins with {magic!r}; expected {MAGIC!r}: not a GGUF file")
    (version,) = struct.unpack("<I", cursor.take(4, "the version"))
    if version not in (2, 3):
        if version & 0xFFFF == 0:
            raise UnsupportedModelError(
                f"{cursor.where}: a big-endian GGUF; only little-endian files are read"
            )
        raise UnsupportedModelError(f"{cursor.where}: GGUF version {version}; versions 2 and 3 are read")
    tensors = cursor.count("the number of tensors", at_least_each=8 + 1 + 4 + 8 + 4 + 8)
    return version, tensors, cursor.count("the number of metadata values", at_least_each=8 + 1 + 4 + 1)


def _value(cursor: "_Cursor", key: str) -> Any:
    what = f"metadata value {key[:64]!r}"
    kind = cursor.u32(what)
    if kind == _STRING:
        return cursor.string(what)
    if kind == _ARRAY:
        return _array(cursor, what)
    return _numbers(cursor, kind, 1, what)[0].item()


def _array(cursor: "_Cursor", what: str) -> Any:
    kind = cursor.u32(what)
    if kind == _ARRAY:
        raise cursor.error(f"{what} is an array of arrays; expected numbers or strings")
    if kind == _STRING:
        return cursor.strings(cursor.count(f"the length of {what}", at_least_each=8), what)
    width = _SCALARS[kind].itemsize if kind in _SCALARS else 1
    return _numbers(cursor, kind, cursor.count(f"the length of {what}", at_least_each=width), what)


def _numbers(cursor: "_Cursor", kind: int, count: int, what: str) -> NDArray[Any]:
    dtype = _SCALARS.get(kind)
    if dtype is None:
        raise cursor.error(f"{what} has type {kind}; expected 0 to 12")
    raw = cursor.take(count * dtype.itemsize, what)
    if dtype.kind == "b" and raw.translate(None, b"\0\1"):
        raise cursor.error(f"{what} is a boolean that is neither 0 nor 1")
    return np.frombuffer(raw, dtype)


def _tensor_entry(cursor: "_Cursor", alignment: int) -> GgufTensor:
    """One tensor's description; `offset` still counts from the data section."""
    name = cursor.string("a tensor's name")
    what = f"tensor {name[:64]!r}"
    if not name:
        raise cursor.error("a tensor has an empty name")
    dimensions = cursor.u32(what)
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise cursor.error(f"{what} has {dimensions} dimensions; expected 1 to {MAX_DIMENSIONS}")
    shape = tuple(reversed(struct.unpack(f"<{dimensions}Q", cursor.take(8 * dimensions, what))))
    code = cursor.u32(what)
    offset = cursor.u64(what)
    block = BLOCK_TYPES.get(code)
    if block is None:
        raise UnsupportedModelError(f"{cursor.where}: {what} has the unknown type {code}")
    elements = 1
    for size in shape:
        elements *= size
    if not 0 < elements < 1 << 62:
        raise cursor.error(f"{what} has the impossible shape {shape}")
    if shape[-1] % block.elements:
        raise cursor.error(
            f"{what} has rows of {shape[-1]}; {block.name} needs a multiple of {block.elements}"
        )
    if offset % alignment:
        raise cursor.error(f"{what} lies at offset {offset}; expected a multiple of {alignment}")
    return GgufTensor(name, shape, block, offset, elements // block.elements * block.nbytes)


def _place(entries: list[GgufTensor], start: int, size: int, where: str) -> dict[str, GgufTensor]:
    """Tensors by name with absolute offsets, checked to lie in the file without overlap."""
    tensors: dict[str, GgufTensor] = {}
    for entry in entries:
        if entry.name in tensors:
            raise ModelFormatError(f"{where}: tensor {entry.name[:64]!r} is described twice")
        end = start + entry.offset + entry.nbytes
        if end > size:
            raise ModelFormatError(
                f"{where}: tensor {entry.name[:64]!r} ends at byte {end} of {size}; was the file cut short?"
            )
        tensors[entry.name] = GgufTensor(
            entry.name, entry.shape, entry.type, start + entry.offset, entry.nbytes
        )
    for left, right in pairwise(sorted(tensors.values(), key=lambda tensor: tensor.offset)):
        if left.offset + left.nbytes > right.offset:
            raise ModelFormatError(f"{where}: tensors {left.name!r} and {right.name!r} overlap")
    return tensors


def _not_utf8(where: str, what: str, raw: bytes) -> ModelFormatError:
    return ModelFormatError(f"{where}: {what} is not UTF-8: {raw[:32]!r}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 64 else text[:61] + "..."


class _Cursor:
    """Reads forward through the header in chunks; every length is checked before it is taken."""

    def __init__(self, fd: int, size: int, where: str) -> None:
        self.fd, self.size, self.where = fd, size, where
        self.limit = min(size, MAX_HEADER_BYTES)
        self.buffer = b""
        self.start = 0  # the buffer's first byte, in the file
        self.at = 0  # the next byte, in the buffer

    @property
    def position(self) -> int:
        return self.start + self.at

    def error(self, message: str) -> ModelFormatError:
        return ModelFormatError(f"{self.where}: {message}")

    def need(self, count: int, what: str) -> None:
        """Make `count` bytes available in the buffer."""
        if self.at + count <= len(self.buffer):
            return
        if self.position + count > self.limit:
            if self.position + count > self.size:
                found = f"{count} bytes from byte {self.position}, but the file has {self.size}"
                raise self.error(f"{what} takes {found}; was it cut short?")
            raise self.error(f"{what} ends past byte {self.limit}; no header is that long")
        self.start, self.at = self.position, 0
        wanted = max(count, min(_CHUNK, self.limit - self.start))
        parts = bytearray(wanted)
        read_bytes(self.fd, self.start, np.frombuffer(parts, np.uint8), self.where)
        self.buffer = bytes(parts)

    def take(self, count: int, what: str) -> bytes:
        self.need(count, what)
        self.at += count
        return self.buffer[self.at - count : self.at]

    def u32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what), "little")

    def u64(self, what: str) -> int:
        self.need(8, what)
        self.at += 8
        value: int = _U64(self.buffer, self.at - 8)[0]
        return value

    def count(self, what: str, at_least_each: int) -> int:
        """A number of things that each take at least so many bytes of what is left of the header."""
        number = self.u64(what)
        if number * at_least_each > self.limit - self.position:
            raise self.error(f"{what} is {number}, more than the {self.size} bytes of the file can hold")
        return number

    def strings(self, count: int, what: str) -> StringArray:
        """Goes past so many strings, most of them without a call for each: vocabularies have 100,000."""
        parts, left, length_at = list[bytes](), count, _U64
        while left > 0:
            buffer, begin, size = self.buffer, self.at, len(self.buffer)
            at = begin
            try:
                for _ in range(left):
                    end = at + 8 + length_at(buffer, at)[0]
                    if end > size:
                        break
                    at = end
                    left -= 1
            except struct.error:  # the buffer's end
                pass
            parts.append(buffer[begin:at])
            self.at = at
            if left > 0:  # one that goes on past the buffer
                length = self.take(8, what)
                parts += length, self.take(int.from_bytes(length, "little"), what)
                left -= 1
        return StringArray(count, b"".join(parts), self.where, what)

    def string(self, what: str) -> str:
        raw = self.take(self.u64(what), what)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise _not_utf8(self.where, what, raw) from None
