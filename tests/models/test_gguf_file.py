"""The GGUF header reader: what the `gguf` package reads, and one clear error for anything else."""

import os
import struct
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nybble.errors import ModelFormatError, NybbleError, UnsupportedModelError
from nybble.models.gguf_file import BLOCK_TYPES, GgufHeader, StringArray, read_bytes, read_header

U8, I32, F32, BOOL, STRING, ARRAY, U64 = 0, 5, 6, 7, 8, 9, 10


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def item(key: bytes, kind: int, payload: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + payload


def entry(
    name: bytes, dimensions: Sequence[int] = (4,), kind: int = 0, offset: int = 0, count: int | None = None
) -> bytes:
    shape = struct.pack(f"<{len(dimensions)}Q", *dimensions)
    number = len(dimensions) if count is None else count
    return text(name) + struct.pack("<I", number) + shape + struct.pack("<IQ", kind, offset)


def gguf(
    items: Sequence[bytes] = (),
    entries: Sequence[bytes] = (),
    data: bytes = b"",
    magic: bytes = b"GGUF",
    version: int = 3,
    item_count: int | None = None,
    entry_count: int | None = None,
) -> bytes:
    """A file made by hand, so that it can be wrong in one place."""
    counts = (
        len(entries) if entry_count is None else entry_count,
        len(items) if item_count is None else item_count,
    )
    header = magic + struct.pack("<IQQ", version, *counts) + b"".join(items) + b"".join(entries)
    return header + b"\0" * (-len(header) % 32) + data


ITEMS = (
    item(b"a.string", STRING, text("é".encode())),
    item(b"a.bool", BOOL, b"\1"),
    item(b"a.float", F32, struct.pack("<f", 0.5)),
    item(b"some.strings", ARRAY, struct.pack("<IQ", STRING, 2) + text(b"x") + text(b"")),
    item(b"some.numbers", ARRAY, struct.pack("<IQ", I32, 3) + struct.pack("<3i", -1, 0, 7)),
)
ENTRIES = (entry(b"t.weight", (32, 2), 8, 0), entry(b"u.weight", (3,), 0, 96))
SOUND = gguf(ITEMS, ENTRIES, bytes(96) + bytes(12))


@pytest.fixture
def header_of(tmp_path: Path) -> Callable[[bytes], GgufHeader]:
    return lambda content: parse(content, tmp_path / "f.gguf")


def parse(content: bytes, path: Path) -> GgufHeader:
    path.write_bytes(content)
    fd = os.open(path, os.O_RDONLY)
    try:
        return read_header(fd, "f.gguf")
    finally:
        os.close(fd)


def decoded(value: Any) -> Any:
    """A metadata value that can be compared."""
    if isinstance(value, StringArray):
        return value.decoded()
    return value.tolist() if isinstance(value, np.ndarray) else value


def test_a_sound_file_is_read(header_of: Callable[[bytes], GgufHeader]) -> None:
    header = header_of(SOUND)
    numbers, strings = (header.metadata.pop(f"some.{kind}") for kind in ("numbers", "strings"))
    assert header.metadata == {"a.string": "é", "a.bool": True, "a.float": 0.5}
    assert (len(strings), strings.decoded()) == (2, ["x", ""])
    assert header.metadata["a.bool"] is True
    np.testing.assert_array_equal(numbers, np.array([-1, 0, 7], np.int32))
    t, u = header.tensors["t.weight"], header.tensors["u.weight"]
    assert (t.shape, t.type.name, t.nbytes) == ((2, 32), "Q8_0", 68)
    assert (u.shape, u.type.name, u.nbytes) == ((3,), "F32", 12)
    assert u.offset - t.offset == 96
    assert u.offset + u.nbytes == len(SOUND)


def test_version_2_has_the_same_layout(header_of: Callable[[bytes], GgufHeader]) -> None:
    header = header_of(gguf(ITEMS, ENTRIES, bytes(108), version=2))
    assert header.version == 2
    assert set(header.tensors) == {"t.weight", "u.weight"}


def test_smollm2_is_read_as_the_gguf_package_reads_it(smollm2_gguf: Path, smollm2_reader: Any) -> None:
    fd = os.open(smollm2_gguf, os.O_RDONLY)
    header = read_header(fd, "smollm2")
    os.close(fd)
    theirs = {
        key: field.contents() for key, field in smollm2_reader.fields.items() if not key.startswith("GGUF.")
    }
    ours = {key: decoded(value) for key, value in header.metadata.items()}
    assert ours == theirs
    assert {
        name: (tensor.shape, tensor.type.name, tensor.offset, tensor.nbytes)
        for name, tensor in header.tensors.items()
    } == {
        tensor.name: (
            tuple(reversed(tensor.shape.tolist())),
            tensor.tensor_type.name,
            tensor.data_offset,
            tensor.n_bytes,
        )
        for tensor in smollm2_reader.tensors
    }


def test_block_sizes_are_those_of_the_gguf_package() -> None:
    from gguf.constants import GGML_QUANT_SIZES

    theirs = {kind.value: (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}
    assert {code: tuple(block) for code, block in BLOCK_TYPES.items()} == {
        code: row for code, row in theirs.items() if code in BLOCK_TYPES
    }


def test_a_file_cut_anywhere_is_refused(header_of: Callable[[bytes], GgufHeader]) -> None:
    for length in range(len(SOUND)):
        with pytest.raises(ModelFormatError, match=r"^f\.gguf: "):
            header_of(SOUND[:length])


HUGE = (1 << 63, (1 << 64) - 1, 1 << 40, 1000)
NUMBERS = item(b"k", ARRAY, struct.pack("<IQ", I32, 1 << 62))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the magic takes 4 bytes"),
        (gguf(magic=b"GGJT"), "begins with b'GGJT'; expected b'GGUF'"),
        *((gguf(item_count=n), f"number of metadata values is {n}") for n in HUGE),
        *((gguf(ITEMS, entry_count=n), f"number of tensors is {n}") for n in HUGE),
        *((gguf([struct.pack("<Q", n) + bytes(40)]), f"key takes {n} bytes") for n in HUGE),
        *((gguf([item(b"k", STRING, struct.pack("<Q", n))]), f"'k' takes {n} bytes") for n in HUGE),
        *(
            (gguf([item(b"k", ARRAY, struct.pack("<IQ", kind, n))]), f"length of metadata value 'k' is {n}")
            for n in HUGE
            for kind in (U8, I32, U64, STRING)
        ),
        (gguf([item(b"k", ARRAY, struct.pack("<IQ", ARRAY, 1) + bytes(64))]), "is an array of arrays"),
        (gguf([item(b"k", 13, bytes(64))]), "has type 13; expected 0 to 12"),
        (gguf([item(b"k", ARRAY, struct.pack("<IQ", 99, 1) + bytes(64))]), "has type 99"),
        (gguf([item(b"k", BOOL, b"\2")]), "neither 0 nor 1"),
        (gguf([item(b"k", STRING, text(b"\xff\xfe"))]), "is not UTF-8"),
        (gguf([item(b"", U8, b"\0")]), "is empty"),
        (gguf([item(b"k", U8, b"\0")] * 2), "'k' is repeated"),
        *(
            (gguf([item(b"general.alignment", 4, struct.pack("<I", n))]), f"general.alignment is {n}")
            for n in (0, 3, 48, 1 << 31)
        ),
        (gguf([item(b"general.alignment", STRING, text(b"32"))]), "general.alignment is '32'"),
        (gguf([], [entry(b"", (4,))], bytes(16)), "empty name"),
        (gguf([], [entry(b"t", (4,), count=0)], bytes(16)), "has 0 dimensions"),
        (gguf([], [entry(b"t", (1,) * 5)], bytes(16)), "has 5 dimensions"),
        (gguf([], [entry(b"t", (4,), count=1 << 31)], bytes(16)), "dimensions"),
        (gguf([], [entry(b"t", (0, 4))], bytes(16)), "impossible shape"),
        (gguf([], [entry(b"t", (1 << 32, 1 << 32))], bytes(16)), "impossible shape"),
        (gguf([], [entry(b"t", ((1 << 64) - 1,) * 4)], bytes(16)), "impossible shape"),
        (gguf([], [entry(b"t", (1 << 40,))], bytes(16)), "was the file cut short"),
        (gguf([], [entry(b"t", (16, 2), 8)], bytes(68)), "rows of 16; Q8_0 needs a multiple of 32"),
        (gguf([], [entry(b"t", (4,), 0, 8)], bytes(64)), "offset 8; expected a multiple of 32"),
        (gguf([], [entry(b"t", (4,), 0, 32)], bytes(40)), "was the file cut short"),
        (gguf([], [entry(b"t", (4,), 0, (1 << 64) - 32)], bytes(40)), "was the file cut short"),
        (gguf([], [entry(b"t"), entry(b"t", (4,), 0, 32)], bytes(64)), "'t' is described twice"),
        (gguf([], [entry(b"t", (9,)), entry(b"u", (4,), 0, 32)], bytes(64)), "'t' and 'u' overlap"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_damaged_header_is_refused_without_allocating(
    header_of: Callable[[bytes], GgufHeader], content: bytes, message: str
) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ModelFormatError) as caught:
            header_of(content)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("f.gguf: ")
    assert peak < 1 << 20


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gguf(version=1), "GGUF version 1; versions 2 and 3"),
        (gguf(version=4), "GGUF version 4"),
        (gguf(version=3 << 24), "big-endian"),
        (gguf([], [entry(b"t", (4,), 4)], bytes(16)), "'t' has the unknown type 4"),
        (gguf([], [entry(b"t", (4,), 1 << 31)], bytes(16)), "unknown type"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_read_is_named(
    header_of: Callable[[bytes], GgufHeader], content: bytes, message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        header_of(content)


def test_a_header_in_a_huge_sparse_file_is_bounded(tmp_path: Path) -> None:
    """A file may be long without taking space; a count that fits it is no reason to believe it."""
    path = tmp_path / "sparse.gguf"
    path.write_bytes(gguf([item(b"k", ARRAY, struct.pack("<IQ", STRING, 1 << 30))]))
    os.truncate(path, 1 << 40)
    fd = os.open(path, os.O_RDONLY)
    with pytest.raises(ModelFormatError, match="is 1073741824, more than"):
        read_header(fd, "sparse.gguf")
    os.close(fd)


def test_a_header_longer_than_one_read_is_read(header_of: Callable[[bytes], GgufHeader]) -> None:
    strings = [f"token {n} {'x' * (n % 50)}" for n in range(60_000)]
    array = struct.pack("<IQ", STRING, len(strings)) + b"".join(text(s.encode()) for s in strings)
    long = "y" * (3 << 20)
    content = gguf([item(b"k", ARRAY, array), item(b"l", STRING, text(long.encode()))], ENTRIES, bytes(108))
    header = header_of(content)
    assert {key: decoded(value) for key, value in header.metadata.items()} == {"k": strings, "l": long}
    assert header.tensors["u.weight"].offset + 12 == len(content)


def test_a_string_of_an_array_that_is_not_utf8_is_named_when_it_is_asked_for(
    header_of: Callable[[bytes], GgufHeader],
) -> None:
    array = struct.pack("<IQ", STRING, 2) + text(b"x") + text(b"\xff\xfe")
    strings = header_of(gguf([item(b"k", ARRAY, array)])).metadata["k"]
    assert len(strings) == 2
    with pytest.raises(ModelFormatError, match=r"^f\.gguf: metadata value 'k' is not UTF-8: b'\\xff\\xfe'$"):
        strings.decoded()


@settings(max_examples=400, deadline=None)
@given(
    changes=st.lists(st.tuples(st.integers(0, len(SOUND) - 1), st.integers(0, 255)), min_size=1, max_size=6),
    cut=st.integers(0, len(SOUND)),
)
def test_any_change_of_bytes_gives_a_header_or_an_error(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]], cut: int
) -> None:
    content = bytearray(SOUND)
    for at, byte in changes:
        content[at] = byte
    content = content[: len(content) - cut // 8]
    path = tmp_path_factory.getbasetemp() / "mutated.gguf"
    try:
        header = parse(bytes(content), path)
    except NybbleError:
        return
    for tensor in header.tensors.values():
        assert 0 <= tensor.offset <= tensor.offset + tensor.nbytes <= len(content)


def test_reading_past_the_end_is_an_error(tmp_path: Path) -> None:
    """A file that shrinks after it was opened."""
    path = tmp_path / "f"
    path.write_bytes(bytes(10))
    fd = os.open(path, os.O_RDONLY)
    with pytest.raises(ModelFormatError, match="ends at byte 10"):
        read_bytes(fd, 4, np.empty(8, np.uint8), "f")
    os.close(fd)
