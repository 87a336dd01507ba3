"""The file of a saved prefix: what an executor's pages hold of some tokens, to be mapped.

```
preamble   32 bytes: magic "NYBPREF\\0", u32 format version, u64 offset and u32 size of the header, u32 CRC-32
           of the header, u32 CRC-32 of the bytes before it
pages      from byte 4096: of each window group in turn, the pages that the token after the prefix sees
tokens     int32 each; they fill whole pages
checksums  u32 CRC-32 of each page, in the file's order
header     JSON, to the end of the file: the fields of `PrefixKey`, "num_tokens", and "tokens_crc32" and
           "checksums_crc32", the CRC-32 of these two parts
```

Numbers are little-endian; what the pages hold is the executor's own. Nothing in a file is believed: where
each part lies follows from `PrefixKey` and the number of tokens, and must end where the file does. Preamble,
header, tokens and checksums are checked when a file is opened, a page when it is read.
"""

import json
import mmap
import os
import stat
import struct
import zlib
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, fields
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from ..errors import ModelFormatError, OutputError
from ..export.atomic_file import new_file
from ..models.config_reader import parse_json_object, shown_names
from ..records import dataclass

MAGIC = b"NYBPREF\0"
FORMAT_VERSION = 1
PAGES_OFFSET = 4096
MAX_HEADER_BYTES = 1 << 20

_PREAMBLE = struct.Struct("<8sIQII")
_CRC = struct.Struct("<I")


@dataclass(frozen=True)
class PrefixKey:
    """What must be the same for a page's bytes to be the same tokens' keys and values."""

    artifact: str  # the digest, hexadecimal
    page_format: str  # whose pages they are, and how arranged: `KvLayout.page_format`
    kv_dtype: str
    page_size: int  # tokens
    windows: tuple[int | None, ...]  # of each group, in tokens
    group_bytes: tuple[int, ...]  # of a page of each group
    rope: str  # rotary embedding: positions are in the keys
    numerics: int  # `NUMERICS_VERSION`


class Places(NamedTuple):
    """Where the parts of a file begin."""

    first: tuple[int, ...]  # of each group, its first page in the file, counted from the prefix's first
    groups: tuple[int, ...]
    tokens: int
    checksums: int
    header: int


def places_of(key: PrefixKey, num_tokens: int) -> Places:
    """The places of a prefix of whole pages."""
    pages, at, count = num_tokens // key.page_size, PAGES_OFFSET, 0
    first, groups = [], []
    for window, size in zip(key.windows, key.group_bytes, strict=True):
        seen = 0 if window is None else max(0, num_tokens - window + 1)
        first.append(seen // key.page_size)
        groups.append(at)
        at += (pages - first[-1]) * size
        count += pages - first[-1]
    checksums = at + 4 * num_tokens
    return Places(tuple(first), tuple(groups), at, checksums, checksums + 4 * count)


def write_prefix(file: Path, key: PrefixKey, tokens: Sequence[int], pages: Sequence[Iterable[bytes]]) -> None:
    """Writes a prefix of whole pages, whose content `pages` gives for each group, from its first page in the
    file on, in pieces of any number of pages. The file appears whole or not at all. Raises `OutputError`
    where it cannot be written, and what `pages` raises."""
    if not tokens or len(tokens) % key.page_size:
        raise ValueError(f"{len(tokens)} tokens do not fill pages of {key.page_size}")
    places = places_of(key, len(tokens))
    try:
        with new_file(Path(os.path.realpath(file))) as output:
            checksums = []
            output.seek(PAGES_OFFSET)
            ends = (*places.groups[1:], places.tokens)
            for of_group, size, end in zip(pages, key.group_bytes, ends, strict=True):
                for piece in of_group:
                    if len(piece) % size:
                        raise ValueError(f"{len(piece)} bytes are no pages of {size}")
                    output.write(piece)
                    checksums += [zlib.crc32(piece[at : at + size]) for at in range(0, len(piece), size)]
                if output.tell() != end:
                    raise ValueError(f"a group's pages end at byte {output.tell()}; expected {end}")
            parts = [np.array(tokens, "<i4").tobytes(), np.array(checksums, "<u4").tobytes()]
            header = json.dumps(
                asdict(key)
                | {
                    "num_tokens": len(tokens),
                    "tokens_crc32": zlib.crc32(parts[0]),
                    "checksums_crc32": zlib.crc32(parts[1]),
                }
            ).encode()
            output.write(b"".join((*parts, header)))
            # The preamble comes last: a file without it is none.
            preamble = _PREAMBLE.pack(MAGIC, FORMAT_VERSION, places.header, len(header), zlib.crc32(header))
            output.seek(0)
            output.write(preamble + _CRC.pack(zlib.crc32(preamble)))
    except OSError as error:
        raise OutputError(f"{file}: cannot be written: {error.strerror or error}") from error


class PrefixFile(AbstractContextManager["PrefixFile"]):
    """An open prefix file of a key: its tokens, and its pages as they are asked for."""

    def __init__(self, file: Path, key: PrefixKey) -> None:
        """Raises `ModelFormatError` naming the file and the part that is damaged, or what the prefix was
        saved for if not for `key`."""
        self._file, self._key = file, key
        try:
            # Opening a pipe that someone put there must not wait for a writer.
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError) as error:
            raise ModelFormatError(
                f"{file}: cannot be read: {getattr(error, 'strerror', None) or error}"
            ) from None
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size < PAGES_OFFSET:
                raise self._damaged("is no saved prefix")
            self._map = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        try:
            self._check()
        except BaseException:
            self.close()
            raise

    @property
    def tokens(self) -> tuple[int, ...]:
        """The prefix; it fills whole pages."""
        return self._tokens

    @property
    def first_pages(self) -> tuple[int, ...]:
        """Of each group, the first page that is kept: those before have left its window."""
        return self._places.first

    @property
    def num_pages(self) -> int:
        """Pages of the prefix."""
        return len(self._tokens) // self._key.page_size

    def pages(self, group: int, begin: int, stop: int) -> bytes:
        """What pages `begin` to `stop` of a group hold. Raises `ModelFormatError` for one that is damaged."""
        first, size = self._places.first[group], self._key.group_bytes[group]
        if not first <= begin <= stop <= self.num_pages:
            raise ValueError(
                f"pages {begin} to {stop} are not in the file; it has {first} to {self.num_pages}"
            )
        before = sum(self.num_pages - each for each in self._places.first[:group])
        at = self._places.groups[group]
        data = self._map[at + (begin - first) * size : at + (stop - first) * size]
        for page in range(begin, stop):
            found = zlib.crc32(data[(page - begin) * size : (page - begin + 1) * size])
            place = self._places.checksums + 4 * (before + page - first)
            if found != _CRC.unpack_from(self._map, place)[0]:
                raise self._damaged(f"the CRC-32 of page {page} of group {group} differs")
        return data

    def close(self) -> None:
        """Unmaps the file. May be called again."""
        self._map.close()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _damaged(self, reason: str) -> ModelFormatError:
        return ModelFormatError(f"{self._file}: {reason}")

    def _check(self) -> None:
        header = self._header()
        for field in fields(PrefixKey):
            value: Any = getattr(self._key, field.name)
            expected = list(value) if isinstance(value, tuple) else value
            if (found := header[field.name]) != expected or type(found) is not type(expected):
                raise self._damaged(f"the prefix was saved for {field.name} {found!r}; expected {expected!r}")
        count = header["num_tokens"]
        if count < 1 or count % self._key.page_size:
            raise self._damaged(f"num_tokens is {count}; expected whole pages of {self._key.page_size}")
        self._places = places = places_of(self._key, count)
        if places.header != self._header_offset:
            raise self._damaged(f"its header begins at byte {self._header_offset}; expected {places.header}")
        parts = {"tokens": (places.tokens, places.checksums), "checksums": (places.checksums, places.header)}
        for name, (begin, end) in parts.items():
            if zlib.crc32(self._map[begin:end]) != header[f"{name}_crc32"]:
                raise self._damaged(f"the CRC-32 of its {name} differs")
        self._tokens = tuple(np.frombuffer(self._map[places.tokens : places.checksums], "<i4").tolist())
        if min(self._tokens) < 0:
            raise self._damaged(f"its tokens hold {min(self._tokens)}; expected 0 or more")

    def _header(self) -> dict[str, Any]:
        raw = self._map[: _PREAMBLE.size + _CRC.size]
        if not raw.startswith(MAGIC):
            raise self._damaged("is no saved prefix")
        _, version, offset, size, crc = _PREAMBLE.unpack_from(raw)
        if zlib.crc32(raw[: _PREAMBLE.size]) != _CRC.unpack_from(raw, _PREAMBLE.size)[0]:
            raise self._damaged("the CRC-32 of its preamble differs")
        if not 1 <= version <= FORMAT_VERSION:
            raise self._damaged(f"its format version is {version}; this Nybble reads up to {FORMAT_VERSION}")
        if size > MAX_HEADER_BYTES or offset + size != len(self._map):
            raise self._damaged(f"it has {len(self._map)} bytes; its preamble says {offset + size}")
        content = self._map[offset : offset + size]
        if zlib.crc32(content) != crc:
            raise self._damaged("the CRC-32 of its header differs")
        header = parse_json_object(content, f"{self._file}: header")
        numbers = ("num_tokens", "tokens_crc32", "checksums_crc32")
        names = {field.name for field in fields(PrefixKey)} | set(numbers)
        if set(header) != names:
            raise self._damaged(f"its header differs in {shown_names(sorted(set(header) ^ names))}")
        for name in numbers:
            if type(header[name]) is not int:
                raise self._damaged(f"{name} is {header[name]!r}; expected a number")
        self._header_offset = offset
        return header
