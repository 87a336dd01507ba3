"""Packed weights kept in a file: the same bits as packed afresh, and no file, however bad, does any harm."""

import json
import logging
import os
import resource
import signal
import struct
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoders import MIXED, Weights, load, paged_logits, quantized, some_ids
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from nybble.errors import ModelFormatError
from nybble.export import atomic_file
from nybble.export.weights import LogicalTensor, LogicalWeights
from nybble.quant import packing_rows
from nybble.quant.packing import QuantizedTensor, from_gptq, quantize_head, to_gptq
from nybble.quant.packing_rows import MatrixRows
from nybble.runtime.cpu_executor import CpuExecutor
from nybble.runtime.packed_cache import cache_files, check_packed, load_packed
from nybble.runtime.packed_file import MappedWeights, write_packed
from nybble.runtime.packed_weights import FreshlyPacked, PackedSource

DIGEST = "ab" * 32
PREAMBLE = struct.Struct("=8sII32sQII")  # then its CRC-32
CASES: dict[str, tuple[str, dict[str, Any], tuple[int, int, bool, bool]]] = {
    "symmetric, tied": ("llama", {"tie_word_embeddings": True}, (4, 64, True, False)),
    "zero points, biases, windows, short group": (
        "qwen2",
        {"use_sliding_window": True, **MIXED},
        (4, 64, False, False),
    ),
    "8 bits, q and k norms": ("qwen3", {}, (8, 32, True, False)),
    "permuted, one group": ("llama", {}, (4, -1, False, True)),
    "permuted": ("qwen2", {"hidden_size": 80}, (8, 32, False, True)),
    "experts": ("mixtral", {"num_local_experts": 3}, (4, 32, False, True)),
}


class NoWeights:
    """Weights that must not be read."""

    def __call__(self) -> LogicalWeights:
        raise AssertionError("the artifact's weights were opened")


@pytest.fixture(scope="module")
def weights(make_tiny_model: Callable[..., Path]) -> Weights:
    """Small, so that every part of the file is soon hit."""
    path = make_tiny_model("qwen2", vocab_size=64, num_hidden_layers=2, intermediate_size=64)
    return quantized(load(path), 4, 64, False, True)


@pytest.fixture(autouse=True)
def user_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("home") / "not yet" / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture(scope="module")
def good(weights: Weights, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of `weights`."""
    folder = tmp_path_factory.mktemp("good")
    load_packed(folder, DIGEST, weights.spec, lambda: weights)
    return cache_files(folder, DIGEST)[0].read_bytes()


def mapped(folder: Path, weights: Weights) -> MappedWeights:
    """From the file that is there."""
    source = load_packed(folder, DIGEST, weights.spec, NoWeights())
    assert isinstance(source, MappedWeights)
    return source


def logits(source: PackedSource) -> NDArray[np.float32]:
    executor = CpuExecutor.from_packed(source, threads=2)
    result = paged_logits(executor, some_ids(source.spec.vocab_size))
    executor.close()
    return result


def assert_same(found: PackedSource, weights: Weights) -> None:
    """Every tensor, bit for bit."""
    expected = FreshlyPacked(weights)
    for name in weights.spec.tensors():
        if name in weights.spec.float_names:
            assert np.array_equal(found.vector(name), expected.vector(name))
            continue
        one, other = found.linear(name), expected.linear(name)
        for field in ("tiles", "rows", "columns", "bits", "kind", "slices_per_group"):
            assert np.array_equal(getattr(one, field), getattr(other, field)), (name, field)
        assert (one.permutation is None) == (other.permutation is None)
        assert other.permutation is None or np.array_equal(one.permutation, other.permutation)


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("case", CASES)
def test_the_same_logits_as_packed_afresh_and_no_weights_are_read(
    case: str, make_tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    family, overrides, packing = CASES[case]
    weights = quantized(load(make_tiny_model(family, **overrides)), *packing)
    executor = CpuExecutor(weights, threads=1)
    expected = paged_logits(executor, some_ids(weights.spec.vocab_size))
    executor.close()
    cold = load_packed(tmp_path, DIGEST, weights.spec, lambda: weights)
    assert np.array_equal(logits(cold), expected)
    assert np.array_equal(logits(mapped(tmp_path, weights)), expected)
    assert_same(mapped(tmp_path, weights), weights)
    assert names(tmp_path) == ["cache/packed.bin"]


def test_arrays_stay_valid_when_the_file_and_its_source_are_gone(weights: Weights, tmp_path: Path) -> None:
    expected = logits(FreshlyPacked(weights))
    source: PackedSource | None = load_packed(tmp_path, DIGEST, weights.spec, lambda: weights)
    assert source is not None
    executor = CpuExecutor.from_packed(source, threads=1)
    source = None
    (tmp_path / "cache/packed.bin").unlink()
    assert np.array_equal(paged_logits(executor, some_ids(weights.spec.vocab_size)), expected)
    executor.close()


def test_writing_holds_some_rows_of_a_matrix_and_never_all(weights: Weights, tmp_path: Path) -> None:
    """An embedding of 26 MB that is quantized as it is read."""

    class Large(Weights):
        def matrix(self, name: str) -> MatrixRows | None:
            if name != self.spec.embedding_name:
                return super().matrix(name)
            return MatrixRows.of_head((self.spec.vocab_size, self.spec.hidden_size), some_rows)

    def some_rows(begin: int, end: int) -> QuantizedTensor:
        return quantize_head(np.ones((end - begin, weights.spec.hidden_size), np.float32))

    spec = replace(weights.spec, vocab_size=400_000, tied_embeddings=True)
    file = tmp_path / "packed.bin"
    with file.open("wb") as output:
        tracemalloc.start()
        write_packed(output, FreshlyPacked(Large(spec, weights.tensors)), DIGEST)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert file.stat().st_size > 25_000_000
    assert peak < 14_000_000


@pytest.mark.parametrize("case", CASES)
def test_a_file_is_the_same_however_few_rows_are_packed_at_once(
    case: str, make_tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, overrides, packing = CASES[case]
    weights = quantized(load(make_tiny_model(family, **overrides)), *packing)
    for source in (weights, OtherHalf(weights)):
        files = []
        for elements in (1, 5000, 1 << 30):
            monkeypatch.setattr(packing_rows, "PIECE_ELEMENTS", elements)
            file = tmp_path / "packed.bin"
            with file.open("wb") as output:
                write_packed(output, FreshlyPacked(source), DIGEST)
            files.append(file.read_bytes())
        assert files[0] == files[1] == files[2]


def test_tensors_are_aligned_and_read_only(weights: Weights, tmp_path: Path) -> None:
    source = load_packed(tmp_path, DIGEST, weights.spec, lambda: weights)
    for name, shape in weights.spec.tensors().items():
        array = source.linear(name).tiles if len(shape) == 2 else source.vector(name)
        assert array.ctypes.data % 64 == 0
        assert not array.flags.writeable


class OtherHalf:
    """Weights as the GPTQ format gives them back, where a group's columns ascend."""

    def __init__(self, weights: Weights) -> None:
        self.spec, self._weights = weights.spec, weights

    def matrix(self, name: str) -> MatrixRows | None:
        tensor = self.tensor(name)
        return MatrixRows.of(tensor) if isinstance(tensor, QuantizedTensor) else None

    def tensor(self, name: str) -> LogicalTensor:
        tensor = self._weights.tensor(name)
        if not isinstance(tensor, QuantizedTensor) or tensor.permutation is None:
            return tensor
        parts = to_gptq(tensor, "gptq_v2")
        return from_gptq(
            parts["qweight"], parts["qzeros"], parts["scales"], parts["g_idx"],
            bits=tensor.bits, group_size=tensor.group_size, checkpoint_format="gptq_v2",
        )  # fmt: skip


@pytest.mark.parametrize("group_size", [64, 32, -1])
def test_both_halves_of_a_permuted_model_are_packed_alike(
    group_size: int, make_tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    weights = quantized(load(make_tiny_model("llama")), 4, group_size, False, True)
    load_packed(tmp_path, DIGEST, weights.spec, lambda: OtherHalf(weights))
    assert_same(mapped(tmp_path, weights), weights)
    assert np.array_equal(logits(mapped(tmp_path, weights)), logits(FreshlyPacked(weights)))


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


def with_preamble(content: bytes, **changes: Any) -> bytes:
    """`content` with another preamble and the right CRC-32 of it."""
    fields = ("magic", "format", "layout", "digest", "offset", "size", "crc")
    values = dict(zip(fields, PREAMBLE.unpack_from(content), strict=True)) | changes
    head = PREAMBLE.pack(*values.values())
    return head + struct.pack("=I", zlib.crc32(head)) + content[PREAMBLE.size + 4 :]


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


def test_where_the_artifact_cannot_be_written_the_users_folder_is_used(
    weights: Weights, good: bytes, tmp_path: Path, user_cache: Path
) -> None:
    (tmp_path / "cache").write_text("a file, so that no folder can be made")
    assert_same(load_packed(tmp_path, DIGEST, weights.spec, lambda: weights), weights)
    assert (user_cache / "nybble" / f"{DIGEST}-packed.bin").read_bytes() == good
    assert_same(mapped(tmp_path, weights), weights)
    assert names(tmp_path) == ["cache"]


def test_no_link_leads_the_writer_elsewhere(weights: Weights, tmp_path: Path, user_cache: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "artifact").mkdir()
    (tmp_path / "artifact/cache").symlink_to(tmp_path / "elsewhere")
    load_packed(tmp_path / "artifact", DIGEST, weights.spec, lambda: weights)
    assert names(tmp_path) == []
    assert len(names(user_cache)) == 1


def test_where_nothing_can_be_written_the_weights_are_packed_each_time(
    weights: Weights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    (tmp_path / "cache").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache/below a file"))
    with caplog.at_level(logging.INFO, "nybble"):
        for _ in range(2):
            source = load_packed(tmp_path, DIGEST, weights.spec, lambda: weights)
            assert isinstance(source, FreshlyPacked)
    assert len(caplog.records) == 4
    assert all(record.levelno == logging.INFO for record in caplog.records)
    assert all("cannot be kept" in message for message in caplog.messages)


def test_a_full_disk_leaves_nothing_behind(weights: Weights, tmp_path: Path, user_cache: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        source = load_packed(tmp_path, DIGEST, weights.spec, lambda: weights)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert isinstance(source, FreshlyPacked)
    assert names(tmp_path) == []
    assert names(user_cache) == []


def test_an_error_of_the_weights_is_raised_and_leaves_nothing(weights: Weights, tmp_path: Path) -> None:
    class Damaged(Weights):
        def tensor(self, name: str) -> LogicalTensor:
            if "layers.1" in name:
                raise ModelFormatError(f"{name}: damaged")
            return super().tensor(name)

    with pytest.raises(ModelFormatError, match=r"layers\.1"):
        load_packed(tmp_path, DIGEST, weights.spec, lambda: Damaged(weights.spec, weights.tensors))
    assert names(tmp_path) == []


def child(run: Callable[[], None]) -> int:
    """Runs in a forked process; its number."""
    number = os.fork()
    if number == 0:
        try:
            run()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return number


def killed(*args: Any, **kwargs: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("place", ["tensor", "fsync", "replace", "_sync_folder"])
@pytest.mark.parametrize("before", [False, True])
def test_a_killed_writer_leaves_the_old_file_or_the_new_one(
    weights: Weights, good: bytes, tmp_path: Path, place: str, before: bool, caplog: Any
) -> None:
    file = cache_files(tmp_path, DIGEST)[0]
    old = with_preamble(good, digest=bytes(32))
    file.parent.mkdir()
    if before:
        file.write_bytes(old)

    class Killed(Weights):
        def tensor(self, name: str) -> LogicalTensor:
            if place == "tensor" and "layers.1" in name:
                killed()
            return super().tensor(name)

    def write() -> None:
        if place != "tensor":
            setattr(atomic_file if place.startswith("_") else os, place, killed)
        load_packed(tmp_path, DIGEST, weights.spec, lambda: Killed(weights.spec, weights.tensors))

    _, status = os.waitpid(child(write), 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    if place == "_sync_folder":
        assert file.read_bytes() == good
    else:
        assert (file.read_bytes() if file.exists() else None) == (old if before else None)
    file.unlink(missing_ok=True)
    load_packed(tmp_path, DIGEST, weights.spec, lambda: weights)
    assert names(tmp_path) == ["cache/packed.bin"]
    assert file.read_bytes() == good


def test_several_processes_that_write_at_once_all_work(
    weights: Weights, good: bytes, tmp_path: Path, user_cache: Path
) -> None:
    def start() -> None:
        for _ in range(10):
            (tmp_path / "cache/packed.bin").unlink(missing_ok=True)
            assert_same(load_packed(tmp_path, DIGEST, weights.spec, lambda: weights), weights)

    children = [child(start) for _ in range(3)]
    assert [os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) for number in children] == [0, 0, 0]
    load_packed(tmp_path, DIGEST, weights.spec, lambda: weights)
    assert names(tmp_path) == ["cache/packed.bin"]
    assert names(user_cache) == []  # none had to give way
    assert (tmp_path / "cache/packed.bin").read_bytes() == good


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
