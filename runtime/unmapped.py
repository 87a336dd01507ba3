"""Parts of a file of packed weights that do not stay in memory: read without a mapping, forgotten by the page
cache, and set apart in the mapping of the others."""

import mmap
import os
import weakref
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..records import dataclass

_AT_ONCE = 1 << 20  # bytes that are read together


@dataclass(frozen=True)
class Section:
    """A section's place in the file, in bytes, and its tensors' by name, counted from the file's start."""

    offset: int
    size: int
    tensors: Mapping[str, int]


class SectionedFile:
    """An open file and its sections: embedding, final norm and head; then one for each layer.

    It has a descriptor of its own, `descriptor`, until it is collected.
    """

    def __init__(self, path: Path, descriptor: int, sections: Sequence[Section]) -> None:
        self.path, self.sections = path, tuple(sections)
        self.descriptor = os.dup(descriptor)
        weakref.finalize(self, os.close, self.descriptor)

    @property
    def ends(self) -> Section:
        return self.sections[0]

    def layer(self, layer: int) -> Section:
        return self.sections[1 + layer]


def set_apart(mapped: mmap.mmap, offset: int, size: int) -> None:
    """Makes a part of a file's mapping one of its own: Linux maps megabytes around a page that is looked at
    where the page cache has them together, but not past the end of a mapping, as which parts that are read in
    another way count."""
    begin = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (offset + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if hasattr(mmap, "MADV_RANDOM") and begin < end:
        mapped.madvise(mmap.MADV_RANDOM, begin, end - begin)


def prefer_huge_pages(mapped: mmap.mmap) -> None:
    """What is not in the page cache yet is read into huge pages, where the file system has them: they are
    mapped whole, and weights read faster through them."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            mapped.madvise(mmap.MADV_HUGEPAGE)


def crc32_of(descriptor: int, offset: int, size: int, crc: int = 0) -> int:
    """The CRC-32 of a part of a file behind what has `crc`. Nothing of it stays in the page cache that this
    process brought there. Of a file that ends before, that of what there is."""
    buffer, end = bytearray(min(size, _AT_ONCE)), offset + size
    while offset < end:
        count = os.preadv(descriptor, [memoryview(buffer)[: end - offset]], offset)
        if count == 0:
            break
        crc = zlib.crc32(memoryview(buffer)[:count], crc)
        forget(descriptor, offset, count)
        offset += count
    return crc


def read_array(descriptor: int, entry: Mapping[str, Any], dtype: type[np.generic]) -> NDArray[Any]:
    """A small tensor, copied. Raises `OSError` for a file that ends before it does."""
    raw = os.pread(descriptor, entry["size"], entry["offset"])
    if len(raw) != entry["size"]:
        raise OSError(0, f"the file ends at byte {entry['offset'] + len(raw)}")
    return np.frombuffer(raw, dtype)


def forget(descriptor: int, offset: int, size: int) -> None:
    """Lets the page cache drop a part of a file; where it can't be asked, it drops what it likes."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_DONTNEED)
