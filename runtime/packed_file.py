"""The file of packed weights, to be mapped: its format, how it is written and read.

```
preamble   72 bytes: magic "NYBPACK\0", u32 format version, u32 layout version, 32 bytes artifact digest,
           u64 offset and u32 size of the table, u32 CRC-32 of the table, u32 CRC-32 of the bytes before it
sections   from byte 4096: embedding, final norm and head; then a section for each layer
table      JSON, to the end of the file: {"sections": [...]}, in the file's order
```

A section begins at a multiple of 4096 and is filled up to the next one with zeros; its tensors begin at
multiples of 64. The experts of a mixture come last in it, one behind the other, the shared one before them.
In the table it is `{"offset", "size", "crc32", "tensors"}`, where `tensors` gives `offset` and `size` of each
tensor by name, counted from the file's start. A linear layer also has `rows`, `columns`, `bits`, `kind` and
`slices_per_group` (`kernels/layout.h`); `NAME.permutation` is int32, norms, biases and gates are float32. All
numbers are in the machine's own byte order; on a machine of the other, no CRC-32 fits.

Nothing in a file is believed: from each linear layer's bits, kind and group the whole table is computed
again, and must equal the one in the file; then every section's CRC-32 is checked, before any of it is used.
"""

import json
import logging
import math
import mmap
import os
import stat
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..devices.residency import HUGE_PAGE, PAGE, ResidencyPlan
from ..errors import ModelFormatError
from ..models.config_reader import parse_json_object
from ..models.spec import ModelSpec
from .packed_weights import (
    HALVES,
    KIND_BITS,
    LAYOUT_VERSION,
    SLICE,
    PackedLinear,
    Packing,
    PackingSource,
    tiles_bytes,
)
from .unmapped import Section, SectionedFile, crc32_of, forget, prefer_huge_pages, read_array, set_apart

MAGIC = b"NYBPACK\0"
FORMAT_VERSION = 1
ALIGNMENT = 64
MAX_TABLE_BYTES = 64 << 20
_CHECKERS = 2  # threads: one alone adds up 2.6 GB a second


class Preamble(NamedTuple):
    """The first bytes of a file, but for their own CRC-32."""

    magic: bytes
    format_version: int
    layout_version: int
    digest: bytes
    table_offset: int
    table_bytes: int
    table_crc: int


_PREAMBLE = struct.Struct("=8sII32sQII")
_CRC = struct.Struct("=I")


class UnusableFile(Exception):
    """Why a file is not used, and the level that is logged with."""

    def __init__(self, reason: str, level: int = logging.WARNING) -> None:
        super().__init__(reason)
        self.level = level


class MappedWeights:
    """`PackedSource` over a file that has been checked; the arrays are read-only and keep it mapped.
    `file` is for reading it past the mapping."""

    def __init__(
        self,
        spec: ModelSpec,
        linears: dict[str, PackedLinear],
        vectors: dict[str, NDArray[np.float32]],
        file: SectionedFile,
    ) -> None:
        self._spec, self._linears, self._vectors, self.file = spec, linears, vectors, file

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    def linear(self, name: str) -> PackedLinear:
        return self._linears[name]

    def vector(self, name: str) -> NDArray[np.float32]:
        return self._vectors[name]


def sections_of(spec: ModelSpec) -> Iterator[dict[str, tuple[int, ...]]]:
    """Name to shape of the tensors of each section."""
    layers = [_experts_last(spec, layer) for layer in range(spec.num_layers)]
    in_layers = {name for layer in layers for name in layer}
    yield {name: shape for name, shape in spec.tensors().items() if name not in in_layers}
    yield from layers


def _experts_last(spec: ModelSpec, layer: int) -> dict[str, tuple[int, ...]]:
    """A layer's tensors, so that what every token goes through is one piece, and so is each expert."""
    shapes = spec.layer_tensors(layer)
    experts = {name: shapes.pop(name) for name in spec.expert_names(layer)}
    return shapes | experts


def write_packed(output: BinaryIO, source: PackingSource, digest: str) -> None:
    """Writes a file piece by piece: of a matrix a few rows are in memory, never all."""
    file, sections = _Writer(output), []
    for shapes in sections_of(source.spec):
        start, file.crc, tensors = file.at, 0, {}
        for name in shapes:
            for part in _parts(source, name, name not in source.spec.float_names):
                file.pad(ALIGNMENT)
                offset = file.at
                for piece in part.pieces:
                    file.write(piece.data.cast("B"))
                tensors[part.name] = {"offset": offset, "size": file.at - offset, **part.form}
        file.pad(PAGE)
        sections.append({"offset": start, "size": file.at - start, "crc32": file.crc, "tensors": tensors})
    file.flush()
    table = json.dumps({"sections": sections}, separators=(",", ":")).encode()
    output.write(table)
    # The preamble comes last: a file without it is none.
    preamble = _PREAMBLE.pack(
        *Preamble(
            MAGIC,
            FORMAT_VERSION,
            LAYOUT_VERSION,
            bytes.fromhex(digest),
            file.at,
            len(table),
            zlib.crc32(table),
        )
    )
    output.seek(0)
    output.write(preamble + _CRC.pack(zlib.crc32(preamble)))


class _Writer:
    """Writes a file's sections; `at` is where it is, `crc` the CRC-32 of what was written since it was 0.
    What fills a huge page of the file is written at once, the rest at `flush`: the page cache then keeps the
    file in huge pages, and maps them whole."""

    def __init__(self, output: BinaryIO) -> None:
        self._output, self.at, self.crc = output, PAGE, 0
        self._page, self._filled = memoryview(bytearray(HUGE_PAGE)), PAGE
        output.seek(0)

    def write(self, piece: bytes | memoryview) -> None:
        self.crc = zlib.crc32(piece, self.crc)
        self.at += len(piece)
        rest = memoryview(piece)
        while len(rest) > 0:
            count = min(len(rest), HUGE_PAGE - self._filled)
            self._page[self._filled : self._filled + count] = rest[:count]
            self._filled += count
            rest = rest[count:]
            if self._filled == HUGE_PAGE:
                self.flush()

    def flush(self) -> None:
        self._output.write(self._page[: self._filled])
        self._filled = 0

    def pad(self, multiple: int) -> None:
        self.write(bytes(-self.at % multiple))


class _Part(NamedTuple):
    """An array in the file, in pieces one after the other."""

    name: str
    pieces: Iterable[NDArray[Any]]
    form: dict[str, int]  # what the table says of it besides its place


def _parts(source: PackingSource, name: str, linear: bool) -> Iterator[_Part]:
    """What a tensor is in the file."""
    if not linear:
        yield _Part(name, [source.vector(name)], {})
        return
    packing = source.packing(name)
    yield _Part(name, packing.pieces(), form_of(packing))
    if packing.permutation is not None:
        yield _Part(f"{name}.permutation", [packing.permutation], {})


def form_of(linear: Packing | PackedLinear) -> dict[str, int]:
    """What the table says of a linear layer's tiles."""
    return _form(linear.rows, linear.columns, linear.bits, linear.kind, linear.slices_per_group)


def _form(rows: int, columns: int, bits: int, kind: int, slices_per_group: int) -> dict[str, int]:
    return {
        "rows": rows,
        "columns": columns,
        "bits": bits,
        "kind": kind,
        "slices_per_group": slices_per_group,
    }


def read_packed(
    descriptor: int, file: Path, spec: ModelSpec, digest: str, residency: ResidencyPlan | None = None
) -> MappedWeights:
    """The checked weights of an open file; `file` is its name. Of what `residency` streams, sections or the
    experts in them, nothing becomes resident but norms, biases, gates and permutations, which are copied."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise UnusableFile("it is not a regular file")
    preamble = _checked_preamble(os.pread(descriptor, _PREAMBLE.size + _CRC.size, 0), digest)
    end = preamble.table_offset + preamble.table_bytes
    if end != status.st_size or preamble.table_offset % PAGE or preamble.table_bytes > MAX_TABLE_BYTES:
        raise UnusableFile(f"it has {status.st_size} bytes; its preamble says {end}")
    raw = os.pread(descriptor, preamble.table_bytes, preamble.table_offset)
    if zlib.crc32(raw) != preamble.table_crc:
        raise UnusableFile("the CRC-32 of its table differs")
    try:
        sections = parse_json_object(raw, "table")["sections"]
        expected = _expected_sections(spec, sections, preamble.table_offset)
    except (ModelFormatError, KeyError, TypeError, IndexError) as error:
        raise UnusableFile(f"its table is damaged: {error}") from None
    if sections != expected:
        raise UnusableFile("its table is not that of this model")
    mapped = mmap.mmap(descriptor, end, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    prefer_huge_pages(mapped)
    content = np.frombuffer(mapped, np.uint8)
    begins = [_streamed_from(spec, residency, number, section) for number, section in enumerate(expected)]
    for begin, section in zip(begins, expected, strict=True):
        set_apart(mapped, begin, section["offset"] + section["size"] - begin)
    _check_sections(content, descriptor, begins, expected)
    linears, vectors = {}, {}
    for number, (shapes, section) in enumerate(zip(sections_of(spec), expected, strict=True)):
        begin, end, tensors = begins[number], section["offset"] + section["size"], section["tensors"]

        def small(entry: dict[str, int], dtype: type[np.generic], begin: int = begin) -> NDArray[Any]:
            return _small(content, descriptor, entry, dtype, entry["offset"] >= begin)

        for name in shapes:
            if name in spec.float_names:
                vectors[name] = small(tensors[name], np.float32)
                continue
            order = tensors.get(f"{name}.permutation")
            permutation = None if order is None else small(order, np.int32)
            linears[name] = _linear(content, tensors[name], permutation)
        if begin < end:
            forget(descriptor, begin, end - begin)
    sections = [
        Section(x["offset"], x["size"], {name: entry["offset"] for name, entry in x["tensors"].items()})
        for x in expected
    ]
    return MappedWeights(spec, linears, vectors, SectionedFile(file, descriptor, sections))


def _check_sections(
    content: NDArray[np.uint8], descriptor: int, begins: Sequence[int], sections: Sequence[dict[str, Any]]
) -> None:
    """Raises `UnusableFile` unless every CRC-32 fits. What is streamed of a section, from where `begins` says
    on, is read without becoming resident."""

    def fits(number: int) -> bool:
        section, begin = sections[number], begins[number]
        crc = zlib.crc32(content[section["offset"] : begin].data)
        crc = crc32_of(descriptor, begin, section["offset"] + section["size"] - begin, crc)
        return bool(crc == section["crc32"])

    pool = ThreadPoolExecutor(_CHECKERS)
    try:
        for number, fit in enumerate(pool.map(fits, range(len(sections)))):
            if not fit:
                raise UnusableFile(f"the CRC-32 of section {number} differs")
    finally:
        pool.shutdown(cancel_futures=True)


def _streamed_from(
    spec: ModelSpec, residency: ResidencyPlan | None, number: int, section: dict[str, Any]
) -> int:
    """Where in the file the part of a section begins that is streamed; its end where none is."""
    begin, layer = section["offset"], number - 1
    if residency is not None:
        if residency.streamed_head if number == 0 else layer in residency.streamed_layers:
            return int(begin)
        if number > 0 and residency.expert_slots and (experts := spec.expert_names(layer)):
            return int(section["tensors"][experts[0]]["offset"])
    return int(begin + section["size"])


def _checked_preamble(raw: bytes, digest: str) -> Preamble:
    if len(raw) < _PREAMBLE.size + _CRC.size or not raw.startswith(MAGIC):
        raise UnusableFile("it is no file of packed weights")
    head = raw[: _PREAMBLE.size]
    if zlib.crc32(head) != _CRC.unpack_from(raw, _PREAMBLE.size)[0]:
        raise UnusableFile("the CRC-32 of its preamble differs")
    preamble = Preamble(*_PREAMBLE.unpack(head))
    for what, found, expected in (
        ("format", preamble.format_version, FORMAT_VERSION),
        ("layout", preamble.layout_version, LAYOUT_VERSION),
        ("artifact", preamble.digest.hex(), digest),
    ):
        if found != expected:
            raise UnusableFile(f"its {what} is {found}; expected {expected}", logging.INFO)
    return preamble


def _expected_sections(spec: ModelSpec, found: Any, end: int) -> list[dict[str, Any]]:
    """The table as this model and the forms of the linear layers in `found` make it; of `found`, a form and a
    CRC-32 are all that is taken over."""
    sections, at, ends = [], PAGE, (spec.embedding_name, spec.head_name)
    for number, shapes in enumerate(sections_of(spec)):
        start, tensors = at, {}
        for name, shape in shapes.items():
            entries = found[number]["tensors"]
            parts: list[tuple[str, int, dict[str, int]]] = [(name, 4 * math.prod(shape), {})]
            if name not in spec.float_names:
                form = _form(
                    *shape, *(_number(entries[name], key) for key in ("bits", "kind", "slices_per_group"))
                )
                _check_form(name, form, in_halves=name in ends)
                parts = [(name, tiles_bytes(**form), form)]
                if f"{name}.permutation" in entries and name not in ends:
                    parts.append((f"{name}.permutation", 4 * shape[1], {}))
            for part, size, about in parts:
                at += -at % ALIGNMENT
                tensors[part] = {"offset": at, "size": size, **about}
                at += size
        at += -at % PAGE
        crc = _number(found[number], "crc32")
        sections.append({"offset": start, "size": at - start, "crc32": crc, "tensors": tensors})
    if at != end:
        raise UnusableFile(f"its table begins at byte {end}; expected {at}")
    return sections


def _number(entry: Any, key: str) -> int:
    value = entry[key]
    if type(value) is not int:
        raise TypeError(f"{key} is not a number")
    return value


def _check_form(name: str, form: dict[str, int], *, in_halves: bool) -> None:
    slices = -(-form["columns"] // SLICE)
    known = form["bits"] in KIND_BITS.get(form["kind"], ()) and (form["kind"] == HALVES) == in_halves
    if not known or not 1 <= form["slices_per_group"] <= slices:
        raise UnusableFile(f"its tensor {name} has a form that no tile has")


def _linear(
    content: NDArray[np.uint8], entry: dict[str, int], permutation: NDArray[np.int32] | None
) -> PackedLinear:
    return PackedLinear(
        _view(content, entry),
        entry["rows"],
        entry["columns"],
        entry["bits"],
        entry["kind"],
        entry["slices_per_group"],
        permutation,
    )


def _small(
    content: NDArray[np.uint8],
    descriptor: int,
    entry: dict[str, int],
    dtype: type[np.generic],
    streamed: bool,
) -> NDArray[Any]:
    """A vector: where it is streamed a copy, since looking at the mapping would keep what lies around it."""
    return read_array(descriptor, entry, dtype) if streamed else _view(content, entry).view(dtype)


def _view(content: NDArray[np.uint8], entry: dict[str, int]) -> NDArray[np.uint8]:
    return content[entry["offset"] : entry["offset"] + entry["size"]]
