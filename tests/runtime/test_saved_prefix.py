"""A saved prefix gives the bits that computing it gives; a damaged file, or another's, gives one line."""

import json
import os
import resource
import struct
import zlib
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoders import UNUSUAL, Weights
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from nybble.errors import ModelFormatError, OutputError, RequestError, SettingError
from nybble.kvcache import KvCache, OutOfPagesError, SequenceBlocks, block_table
from nybble.quant.packing import quantize_head
from nybble.runtime.batch import Batch
from nybble.runtime.cpu_executor import CpuExecutor
from nybble.runtime.prefix_file import PrefixFile, PrefixKey, places_of, write_prefix
from nybble.runtime.saved_prefix import load_prefix, prefix_key, save_prefix

SPEC = replace(UNUSUAL, num_layers=3, sliding_windows=(20, None, None))
DIGEST, WINDOWS, BLOCKS = "5a" * 32, (20, None), 12
IDS = [(7 * i * i + 3 * i) % SPEC.vocab_size for i in range(70)]
PREFIX = IDS[:50]  # three pages, and two tokens


@pytest.fixture(scope="module")
def executor() -> Iterator[CpuExecutor]:
    rng = np.random.default_rng(5)
    tensors: dict[str, Any] = {}
    for name, shape in SPEC.tensors().items():
        values = rng.normal(size=shape).astype(np.float32)
        tensors[name] = quantize_head(values) if len(shape) == 2 else values
    executor = CpuExecutor(Weights(SPEC, tensors), threads=1)
    yield executor
    executor.close()


def fresh(executor: CpuExecutor, num_blocks: int = BLOCKS) -> KvCache:
    """An empty cache, as after a restart."""
    executor.allocate_kv(num_blocks, 16, "int8")
    return KvCache(num_blocks, 16, WINDOWS)


def run(
    executor: CpuExecutor, cache: KvCache, blocks: SequenceBlocks, ids: list[int], computed: int
) -> NDArray[np.float32]:
    """Logits of the last of the tokens from `computed` on."""
    for group, src, dst in cache.take_copies():
        executor.copy_blocks(np.array([src], np.int32), np.array([dst], np.int32), group)
    count = len(ids) - computed
    blocks.append(count)
    batch = Batch(
        np.array(ids[computed:], np.int32),
        np.array([0, count], np.int32),
        np.array([computed], np.int32),
        block_table([blocks]),
        np.array(blocks.slots(computed, count), np.int32),
        np.array([count - 1], np.int32),
    )
    logits = executor.step(batch).copy()
    cache.insert(blocks, ids, len(ids))
    blocks.release_window(len(ids))
    return logits


@pytest.fixture(scope="module")
def saved(executor: CpuExecutor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of `PREFIX`, saved from a cache in which others ran before."""
    cache = fresh(executor)
    hog = cache.sequence()
    run(executor, cache, hog, IDS[20:40], 0)
    blocks = cache.sequence()
    run(executor, cache, blocks, PREFIX, 0)
    blocks.release()
    file = tmp_path_factory.mktemp("prefix") / "system.prefix"
    assert save_prefix(file, DIGEST, executor, cache, PREFIX) == 48
    hog.release()
    cache.check()
    return file


def test_a_loaded_prefix_gives_the_bits_of_computing_it(executor: CpuExecutor, saved: Path) -> None:
    alone = fresh(executor)
    expected = run(executor, alone, alone.sequence(), IDS, 0)
    cache = fresh(executor)
    assert load_prefix(saved, DIGEST, executor, cache) == tuple(PREFIX[:48])
    assert cache.match(PREFIX[:20]) == 0, "what token 16 sees of the window is not in the file"
    blocks = cache.sequence()
    computed = cache.adopt(blocks, IDS)
    assert computed == 48
    assert np.array_equal(run(executor, cache, blocks, IDS, computed), expected)
    cache.check()
    assert cache.pages_pinned == 3
    blocks.release()
    assert cache.pages_available == BLOCKS - 3, "it stays"
    assert load_prefix(saved, DIGEST, executor, cache) == tuple(PREFIX[:48]), "again, from the tree"
    for _ in range(2):
        cache.unpin(PREFIX[:48])
    assert cache.pages_available == BLOCKS


def test_only_pages_in_the_window_are_kept(executor: CpuExecutor, saved: Path) -> None:
    key = prefix_key(executor, DIGEST)
    with PrefixFile(saved, key) as file:
        assert file.first_pages == (1, 0), "token 48 sees 29 to 48"
        assert file.num_pages == 3
        assert len(file.pages(1, 0, 3)) == 3 * key.group_bytes[1]
        assert file.pages(0, 1, 3) == file.pages(0, 1, 2) + file.pages(0, 2, 3)
        for group, begin, stop in ((0, 0, 2), (1, 2, 1), (1, 1, 4)):
            with pytest.raises(ValueError, match="are not in the file"):
                file.pages(group, begin, stop)
        file.close()
        file.close()


def test_a_cache_without_room_is_left_as_it_was(executor: CpuExecutor, saved: Path) -> None:
    cache = fresh(executor, 4)
    blocks = cache.sequence()
    blocks.append(30)
    with pytest.raises(OutOfPagesError, match="3 KV pages are needed; 2 of 4 are free"):
        load_prefix(saved, DIGEST, executor, cache)
    cache.check()
    assert (cache.pages_available, cache.pages_pinned) == (2, 0)


def test_what_cannot_be_saved_or_loaded_is_named(executor: CpuExecutor, saved: Path, tmp_path: Path) -> None:
    cache = fresh(executor)
    with pytest.raises(RequestError, match="none of the prefix's 50 tokens are in the prefix tree"):
        save_prefix(tmp_path / "x", DIGEST, executor, cache, PREFIX)
    assert not list(tmp_path.iterdir())
    with pytest.raises(SettingError, match="sharing of prefixes is switched off"):
        load_prefix(saved, DIGEST, executor, KvCache(BLOCKS, 16, WINDOWS, share_prefixes=False))
    load_prefix(saved, DIGEST, executor, cache)
    adopting = cache.sequence()
    cache.adopt(adopting, PREFIX[:40])
    with pytest.raises(ValueError, match="take_copies comes before"):
        load_prefix(saved, DIGEST, executor, cache)
    cache.take_copies()
    for place in (tmp_path / "missing" / "x", tmp_path):
        with pytest.raises(OutputError, match=f"^{place}: cannot be written: "):
            save_prefix(place, DIGEST, executor, cache, PREFIX)
    for place in (tmp_path / "missing", tmp_path):
        with pytest.raises(ModelFormatError, match=f"^{place}: "):
            load_prefix(place, DIGEST, executor, cache)


def test_a_full_disk_leaves_the_old_file(executor: CpuExecutor, saved: Path, tmp_path: Path) -> None:
    cache = fresh(executor)
    load_prefix(saved, DIGEST, executor, cache)
    file = tmp_path / "a [b].prefix"
    file.write_bytes(b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        with pytest.raises(OutputError, match="cannot be written: File too large"):
            save_prefix(file, DIGEST, executor, cache, PREFIX)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    assert file.read_bytes() == b"old"
    assert save_prefix(file, DIGEST, executor, cache, PREFIX) == 48
    assert file.read_bytes() == saved.read_bytes()


def test_only_a_regular_file_is_read(executor: CpuExecutor, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").touch()
    for name in ("pipe", "empty"):
        with pytest.raises(ModelFormatError, match=f"{name}: is no saved prefix$"):
            PrefixFile(tmp_path / name, prefix_key(executor, DIGEST))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_is_found_and_nothing_stays_in_the_cache(
    executor: CpuExecutor, saved: Path, tmp_path: Path, data: st.DataObject
) -> None:
    content = bytearray(saved.read_bytes())
    places = places_of(prefix_key(executor, DIGEST), 48)
    kind = data.draw(st.sampled_from(["bit", "cut", "longer"]))
    if kind == "bit":
        parts = [
            (0, 32),
            (4096, places.tokens),
            (places.tokens, places.header),
            (places.header, len(content)),
        ]
        begin, end = data.draw(st.sampled_from(parts))
        content[data.draw(st.integers(begin, end - 1))] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "cut":
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        content += bytes(data.draw(st.integers(1, 40)))
    file = tmp_path / "damaged"
    file.write_bytes(content)
    cache = fresh(executor)
    with pytest.raises(ModelFormatError) as raised:
        load_prefix(file, DIGEST, executor, cache)
    assert str(raised.value).startswith(f"{file}: ")
    assert "\n" not in str(raised.value)
    assert cache.statistics.cached_pages == cache.pages_pinned == 0
    assert cache.pages_available == BLOCKS
    cache.check()


OTHERS: dict[str, Any] = {
    "artifact": "00" * 32,
    "page_format": "ort-1",
    "kv_dtype": "f16",
    "page_size": 8,
    "windows": (21, None),
    "group_bytes": (1, 2),
    "rope": "RopeSpec(theta=1.0)",
    "numerics": 0,
}


@pytest.mark.parametrize("name", [field.name for field in fields(PrefixKey)])
def test_a_prefix_of_something_else_is_refused(executor: CpuExecutor, saved: Path, name: str) -> None:
    key = replace(prefix_key(executor, DIGEST), **{name: OTHERS[name]})
    with pytest.raises(ModelFormatError, match=f"^{saved}: the prefix was saved for {name} .*; expected "):
        PrefixFile(saved, key)


def forge(saved: Path, file: Path, version: int = 1, **changes: Any) -> None:
    """The file with other values in its header and every checksum right."""
    content = saved.read_bytes()
    _, _, offset, _, _ = struct.unpack_from("<8sIQII", content)
    header = json.loads(content[offset:]) | changes
    text = json.dumps({key: value for key, value in header.items() if value != "absent"}).encode()
    preamble = struct.pack("<8sIQII", content[:8], version, offset, len(text), zlib.crc32(text))
    file.write_bytes(
        preamble + struct.pack("<I", zlib.crc32(preamble)) + content[32:offset] + text,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"version": 2}, "its format version is 2; this Nybble reads up to 1"),
        ({"version": 0}, "its format version is 0"),
        ({"num_tokens": 1 << 62}, "its header begins at byte"),
        ({"num_tokens": 32}, "its header begins at byte"),
        ({"num_tokens": 0}, "num_tokens is 0; expected whole pages of 16"),
        ({"num_tokens": -16}, "num_tokens is -16"),
        ({"num_tokens": 47}, "num_tokens is 47"),
        ({"num_tokens": 48.0}, "num_tokens is 48.0; expected a number"),
        ({"num_tokens": True}, "num_tokens is True"),
        ({"tokens_crc32": 1}, "the CRC-32 of its tokens differs"),
        ({"checksums_crc32": 1}, "the CRC-32 of its checksums differs"),
        ({"rope": "absent"}, "its header differs in 'rope'"),
        ({"more": 1}, "its header differs in 'more'"),
        ({"page_size": 16.0}, "saved for page_size 16.0; expected 16"),
        ({"windows": None}, "saved for windows None"),
    ],
)
def test_headers_are_not_believed(
    executor: CpuExecutor, saved: Path, tmp_path: Path, changes: dict[str, Any], message: str | None
) -> None:
    file = tmp_path / "forged"
    forge(saved, file, **changes)
    if message is None:
        PrefixFile(file, prefix_key(executor, DIGEST)).close()
        return
    with pytest.raises(ModelFormatError, match=f"^{file}: .*{message}"):
        PrefixFile(file, prefix_key(executor, DIGEST))


def test_tokens_of_another_vocabulary_are_refused(executor: CpuExecutor, tmp_path: Path) -> None:
    key = prefix_key(executor, DIGEST)
    pages = [[bytes(size)] for size in key.group_bytes]
    for token in (SPEC.vocab_size, -1):
        write_prefix(tmp_path / "x", key, [token] * 16, pages)
        with pytest.raises((RequestError, ModelFormatError), match=f"token.* {token}"):
            load_prefix(tmp_path / "x", DIGEST, executor, fresh(executor))
    with pytest.raises(ValueError, match="do not fill pages"):
        write_prefix(tmp_path / "x", key, [1] * 15, pages)
    with pytest.raises(ValueError, match="expected"):
        write_prefix(tmp_path / "x", key, [1] * 32, pages)
