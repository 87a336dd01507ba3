"""No file of packed weights, however damaged, stale, foreign or hostile, does any harm."""

import json
import logging
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from decoders import Weights, load, quantized
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packed_files import DIGEST, PREAMBLE, NoWeights, assert_same, mapped, with_preamble

from nybble.errors import ModelFormatError
from nybble.quant.packing import QuantizedTensor
from nybble.runtime.packed_cache import cache_files, check_packed, load_packed
from nybble.runtime.packed_weights import KIND_BITS


def rebuilt(folder: Path, content: bytes, weights: Weights, good: bytes, caplog: Any) -> str:
    """Puts `content` where the file is looked for; what comes back is right and the file is good again. The
    line that was logged."""
    file = cache_files(folder, DIGEST)[0]
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(content)
    caplog.clear()
    with caplog.at_level(logging.INFO, "nybble"):
        source = load_packed(folder, DIGEST, weights.spec, lambda: weights)
    assert_same(source, weights)
    assert file.read_bytes() == good
    (line,) = caplog.messages
    assert line.startswith(f"{file}: is not used: ")
    assert "\n" not in line
    return str(line)


def table_of(content: bytes) -> tuple[int, dict[str, Any]]:
    """Where the table begins, and the table."""
    offset, size = PREAMBLE.unpack_from(content)[4:6]
    return offset, json.loads(content[offset : offset + size])


def with_table(content: bytes, table: bytes) -> bytes:
    """`content` with another table and right CRC-32s: what somebody wrote on purpose."""
    offset, _ = table_of(content)
    return with_preamble(content[:offset] + table, size=len(table), crc=zlib.crc32(table))


@given(share=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_changed_bit_anywhere_is_found(
    weights: Weights, good: bytes, tmp_path: Path, caplog: Any, share: float, bit: int
) -> None:
    used = [*range(PREAMBLE.size + 4), *range(4096, len(good))]  # zeros lie between
    content = bytearray(good)
    content[used[int(share * len(used))]] ^= 1 << bit
    rebuilt(tmp_path, bytes(content), weights, good, caplog)


def test_a_changed_byte_in_every_tensor_and_every_field_is_found(
    weights: Weights, good: bytes, tmp_path: Path, caplog: Any
) -> None:
    places = [*range(PREAMBLE.size + 4), len(good) - 1]
    for section in table_of(good)[1]["sections"]:
        places += [section["offset"] + section["size"] - 1]
        places += [entry["offset"] + entry["size"] // 2 for entry in section["tensors"].values()]
    for place in places:
        content = bytearray(good)
        content[place] ^= 255
        rebuilt(tmp_path, bytes(content), weights, good, caplog)


@given(share=st.floats(0, 1, exclude_max=True))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_truncated_file_is_found(
    weights: Weights, good: bytes, tmp_path: Path, caplog: Any, share: float
) -> None:
    rebuilt(tmp_path, good[: int(share * len(good))], weights, good, caplog)


@pytest.mark.parametrize("length", [0, 1, 71, 72, 4095, 4096])
def test_a_file_cut_at_an_edge_is_found(
    weights: Weights, good: bytes, tmp_path: Path, caplog: Any, length: int
) -> None:
    rebuilt(tmp_path, good[:length], weights, good, caplog)


STALE: dict[str, Callable[[bytes], bytes]] = {
    "format": lambda good: with_preamble(good, format=2),
    "layout": lambda good: with_preamble(good, layout=0),
    "artifact": lambda good: with_preamble(good, digest=bytes(32)),
}


@pytest.mark.parametrize("what", STALE)
def test_another_version_or_artifact_is_replaced(
    weights: Weights, good: bytes, tmp_path: Path, caplog: Any, what: str
) -> None:
    assert f"its {what} is" in rebuilt(tmp_path, STALE[what](good), weights, good, caplog)
    assert caplog.records[0].levelno == logging.INFO


def other_byte_order(good: bytes) -> bytes:
    values = PREAMBLE.unpack_from(good)
    order = ">" if struct.pack("=H", 1) == struct.pack("<H", 1) else "<"
    head = struct.pack(order + PREAMBLE.format[1:], *values)
    return head + struct.pack(order + "I", zlib.crc32(head)) + good[PREAMBLE.size + 4 :]


FOREIGN: dict[str, Callable[[bytes], bytes]] = {
    "other byte order": other_byte_order,
    "text": lambda good: b"nothing of the kind" * 1000,
    "longer": lambda good: good + bytes(4096),
    "table offset far out": lambda good: with_preamble(good, offset=(1 << 64) - 4096),
    "table of everything": lambda good: with_preamble(good, offset=0, size=len(good)),
    "table size far out": lambda good: with_preamble(good, size=(1 << 32) - 1),
    "no table": lambda good: with_table(good, b""),
    "table is no object": lambda good: with_table(good, b"[1]"),
    "table is deep": lambda good: with_table(good, b'{"sections":' + b"[" * 100_000),
    "table is not UTF-8": lambda good: with_table(good, b'{"sections":"\xff"}'),
    "no sections": lambda good: with_table(good, b"{}"),
    "sections are a string": lambda good: with_table(good, b'{"sections":"abc"}'),
    "sections are an object": lambda good: with_table(good, b'{"sections":{"0":1}}'),
    "no section": lambda good: with_table(good, b'{"sections":[]}'),
    "sections without tensors": lambda good: with_table(good, b'{"sections":[{},{},{}]}'),
    "sections are numbers": lambda good: with_table(good, b'{"sections":[1,2,3]}'),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_a_foreign_file_is_replaced(
    weights: Weights, good: bytes, tmp_path: Path, caplog: Any, what: str
) -> None:
    rebuilt(tmp_path, FOREIGN[what](good), weights, good, caplog)


VALUES = [
    -1,
    0,
    1,
    3,
    5,
    64,
    4096,
    1 << 31,
    1 << 63,
    1 << 70,
    -(1 << 63),
    1.5,
    1e308,
    True,
    None,
    "4",
    [],
    {},
]


def entries(table: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for section in table["sections"]:
        yield section
        yield from section["tensors"].values()


@given(data=st.data(), value=st.sampled_from(VALUES))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_hostile_table_maps_nothing(
    weights: Weights, good: bytes, tmp_path: Path, caplog: Any, data: st.DataObject, value: Any
) -> None:
    """Every CRC-32 fits; one number of the table is another."""
    _, table = table_of(good)
    entry = data.draw(st.sampled_from(list(entries(table))))
    key = data.draw(st.sampled_from(sorted(entry)))
    if type(value) is type(entry[key]) and value == entry[key]:
        return
    entry[key] = value
    rebuilt(tmp_path, with_table(good, json.dumps(table).encode()), weights, good, caplog)


def test_no_other_kind_of_tiles_passes_for_a_tensors(
    weights: Weights, good: bytes, tmp_path: Path, caplog: Any
) -> None:
    """Also one of the same size: embedding and head are in halves, and nothing else is."""
    for section, of_section in enumerate(table_of(good)[1]["sections"]):
        for name, entry in of_section["tensors"].items():
            for kind in KIND_BITS if "kind" in entry else ():
                _, table = table_of(good)
                if table["sections"][section]["tensors"][name]["kind"] != kind:
                    table["sections"][section]["tensors"][name]["kind"] = kind
                    rebuilt(tmp_path, with_table(good, json.dumps(table).encode()), weights, good, caplog)


def test_tensors_too_many_or_too_few_in_the_table(
    weights: Weights, good: bytes, tmp_path: Path, caplog: Any
) -> None:
    for name in [*table_of(good)[1]["sections"][1]["tensors"]]:
        _, table = table_of(good)
        del table["sections"][1]["tensors"][name]
        rebuilt(tmp_path, with_table(good, json.dumps(table).encode()), weights, good, caplog)
    _, table = table_of(good)
    table["sections"][1]["tensors"]["model.norm.weight.permutation"] = {"offset": 4096, "size": 4}
    rebuilt(tmp_path, with_table(good, json.dumps(table).encode()), weights, good, caplog)


def test_a_file_of_another_model_is_replaced(
    weights: Weights, good: bytes, tmp_path: Path, caplog: Any, make_tiny_model: Callable[..., Path]
) -> None:
    other = quantized(load(make_tiny_model("llama", vocab_size=64)), 4, 64, True, False)
    load_packed(tmp_path, DIGEST, other.spec, lambda: other)
    content = cache_files(tmp_path, DIGEST)[0].read_bytes()
    rebuilt(tmp_path, content, weights, good, caplog)


def test_a_pipe_or_folder_in_its_place_is_no_obstacle(weights: Weights, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    os.mkfifo(tmp_path / "cache/packed.bin")
    assert_same(load_packed(tmp_path, DIGEST, weights.spec, lambda: weights), weights)
    assert_same(mapped(tmp_path, weights), weights)
    (tmp_path / "cache/packed.bin").unlink()
    (tmp_path / "cache/packed.bin").mkdir()
    assert_same(load_packed(tmp_path, DIGEST, weights.spec, lambda: weights), weights)


def test_a_sound_file_of_other_weights_is_found_by_verify(weights: Weights, tmp_path: Path) -> None:
    """Right in every CRC-32 and under the right digest, which is all that a start looks at."""
    name = "model.layers.1.mlp.up_proj.weight"
    tensor = weights.tensors[name]
    assert isinstance(tensor, QuantizedTensor)
    other = Weights(weights.spec, weights.tensors | {name: changed(tensor)})
    check_packed(tmp_path, DIGEST, weights.spec, NoWeights())  # no file, nothing to compare
    load_packed(tmp_path, DIGEST, weights.spec, lambda: other)
    with pytest.raises(ModelFormatError, match=r"packed\.bin: model\.layers\.1\.mlp\.up_proj"):
        check_packed(tmp_path, DIGEST, weights.spec, lambda: weights)
    check_packed(tmp_path, DIGEST, weights.spec, lambda: other)


def changed(tensor: QuantizedTensor) -> QuantizedTensor:
    """The same with one integer changed."""
    packed = tensor.packed.copy()
    packed[3, 5] ^= 1
    return replace(tensor, packed=packed)
