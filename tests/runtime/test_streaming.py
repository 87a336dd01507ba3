"""Streamed weights: the bits of resident ones however they are divided, and none of them stays in memory."""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoders import MIXED, load, quantized
from forked import in_child
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from streamed_models import DIGEST, LAYERS, LENGTH, SEQUENCES, Description, StreamedModel

from nybble import _kernels
from nybble.devices.residency import ResidencyPlan
from nybble.errors import ExecutorError, SettingError
from nybble.runtime.cpu_executor import CpuExecutor
from nybble.runtime.packed_cache import open_packed
from nybble.runtime.packed_file import UnusableFile
from nybble.runtime.packed_weights import FreshlyPacked
from nybble.runtime.streaming import buffer_bytes, streamed_bytes

MODELS: dict[str, Description] = {
    "tied": ("llama", {"tie_word_embeddings": True}, (4, 64, True, False)),
    "biases, windows, zero points": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 24, "layer_types": MIXED["layer_types"] * 2},
        (4, 64, False, False),
    ),
    "permuted, a group a row, odd sizes": (
        "qwen3",
        {"hidden_size": 80, "vocab_size": 333, "intermediate_size": 112},
        (8, -1, False, True),
    ),
    "experts": (
        "qwen2_moe",
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 80,
            "mlp_only_layers": [1],
        },
        (4, 32, False, True),
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def model(
    request: pytest.FixtureRequest, make_tiny_model: Callable[..., Path], tmp_path_factory: Any
) -> StreamedModel:
    return StreamedModel.made(MODELS[request.param], make_tiny_model, tmp_path_factory.mktemp("streamed"))


@pytest.fixture(scope="module")
def tied(make_tiny_model: Callable[..., Path], tmp_path_factory: Any) -> StreamedModel:
    path = make_tiny_model("llama", num_hidden_layers=LAYERS, tie_word_embeddings=True)
    return StreamedModel(quantized(load(path), 4, 64, True, False), tmp_path_factory.mktemp("streamed"))


EVERYTHING = ResidencyPlan.spread(LAYERS, LAYERS, streamed_head=True, buffers=2)
PLANS = st.builds(
    lambda layers, head, buffers: ResidencyPlan(LAYERS, tuple(sorted(layers)), head, buffers),
    st.sets(st.integers(0, LAYERS - 1)),
    st.booleans(),
    st.integers(2, 4),
)
# Steps: for each sequence the tokens it gets, some over what is unpacked at once and over the rows that are
# read together; and whether logits are asked for.
STEPS = st.lists(
    st.tuples(
        st.lists(st.sampled_from([0, 1, 1, 3, 17, 70]), min_size=SEQUENCES, max_size=SEQUENCES).filter(any),
        st.integers(0, 3).map(bool),
    ),
    min_size=1,
    max_size=5,
)


@given(residency=PLANS, threads=st.integers(1, 4), steps=STEPS)
@settings(max_examples=40)
def test_any_residency_gives_the_bits_of_resident_weights(
    model: StreamedModel, residency: ResidencyPlan, threads: int, steps: list[tuple[list[int], bool]]
) -> None:
    executor = model.executor(residency, threads)
    past = [0] * SEQUENCES
    for counts, rows in steps:
        chunks = [(s, n) for s, n in enumerate(counts) if n and past[s] + n <= LENGTH]
        if not chunks:
            continue
        batch = model.batch(chunks, past, rows)
        assert np.array_equal(executor.step(batch), model.resident.step(batch))
        assert executor.best_tokens == model.resident.best_tokens
        for s, n in chunks:
            past[s] += n
    executor.close()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("residency", [ResidencyPlan(LAYERS, (0, LAYERS - 1)), EVERYTHING])
def test_the_highest_logit_alone_is_that_of_resident_weights(
    model: StreamedModel, residency: ResidencyPlan, threads: int
) -> None:
    executor = model.executor(residency, threads)
    for t in range(40):
        batch = model.batch([(0, 1)], [t])
        expected = model.resident.step(batch)[0].copy()
        row = executor.step(replace(batch, best_only=True))[0]
        assert executor.best_tokens == [expected.argmax()]
        found = np.flatnonzero(row > -np.inf)
        assert expected.argmax() in found
        assert np.array_equal(row[found], expected[found])
        # A head that is streamed is read whole.
        assert (executor.skipped_bytes > 0) <= (not residency.streamed_head)
    executor.close()


def test_a_step_of_no_tokens_leaves_the_stream_as_it_is(tied: StreamedModel) -> None:
    expected = tied.steps(tied.resident)
    executor = tied.executor(EVERYTHING)
    nothing = tied.batch([(0, 0)], [0])
    assert executor.step(nothing).shape == (0, tied.spec.vocab_size)
    assert np.array_equal(tied.steps(executor), expected)
    assert executor.step(nothing).shape == (0, tied.spec.vocab_size)
    assert np.array_equal(tied.steps(executor), expected)


def test_a_batch_that_is_refused_leaves_the_stream_as_it_is(tied: StreamedModel) -> None:
    executor = tied.executor(EVERYTHING)
    batch = tied.batch([(0, 5)], [0])
    for _ in range(2):
        with pytest.raises(ExecutorError, match="token_ids"):
            executor.step(replace(batch, token_ids=batch.token_ids + tied.spec.vocab_size))
        assert np.array_equal(executor.step(batch), tied.resident.step(batch))


def test_two_executors_of_a_file_run_at_once(tied: StreamedModel) -> None:
    expected = tied.steps(tied.resident, (40, *[1] * 20))
    found: dict[int, NDArray[np.float32]] = {}

    def run(number: int, residency: ResidencyPlan) -> None:
        found[number] = tied.steps(tied.executor(residency), (40, *[1] * 20))

    plans = (EVERYTHING, ResidencyPlan(LAYERS, (1, 3)), ResidencyPlan(LAYERS, (), True))
    threads = [threading.Thread(target=run, args=each) for each in enumerate(plans)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [0, 1, 2]
    assert all(np.array_equal(logits, expected) for logits in found.values())


@pytest.mark.parametrize("steps_before", [0, 3])
def test_a_forked_child_and_its_parent_both_go_on(tied: StreamedModel, steps_before: int) -> None:
    expected = tied.steps(tied.resident)
    executor = tied.executor(EVERYTHING)
    for _ in range(steps_before):
        tied.steps(executor)

    def check() -> bool:
        return all(np.array_equal(tied.steps(executor), expected) for _ in range(2))

    assert in_child(check) == 0
    assert in_child(lambda: executor.close() is None) == 0  # a child that never ran it
    assert check()


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="reads Linux's /proc")
def test_nothing_is_read_before_the_first_step_and_no_thread_is_left(tied: StreamedModel) -> None:
    def bytes_read() -> int:
        """From disks."""
        (line,) = (x for x in Path("/proc/self/io").read_text().splitlines() if x.startswith("read_bytes"))
        return int(line.split()[1])

    def settles_at(threads: int) -> bool:
        """Whether there are so many threads once the system's list has none that have ended."""
        deadline = time.monotonic() + 10
        while (found := len(os.listdir("/proc/self/task"))) != threads and time.monotonic() < deadline:
            time.sleep(0.01)
        return found == threads

    threads = len(os.listdir("/proc/self/task"))
    source = tied.open(EVERYTHING)
    before = bytes_read()
    executor = CpuExecutor.from_packed(source, threads=1, residency=EVERYTHING)
    executor.allocate_kv(tied.pages.num_blocks, tied.pages.page_size, "f16")
    assert bytes_read() == before
    assert settles_at(threads)
    tied.steps(executor)
    executor.close()
    assert settles_at(threads)


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_it_closes_while_it_reads_ahead(tied: StreamedModel, count: int) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        executor = tied.executor(EVERYTHING)
        tied.steps(executor, (1,) * count) if count else None
        executor.close()
        del executor
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_truncated_file_fails_the_step_and_a_whole_one_runs_again(
    tied: StreamedModel, tmp_path: Path
) -> None:
    """Nothing of the file is mapped into use where all of it is streamed."""
    content = tied.file.read_bytes()
    copy = tmp_path / "packed.bin"
    copy.write_bytes(content)
    source = open_packed(copy, tied.spec, DIGEST, EVERYTHING)
    executor = CpuExecutor.from_packed(source, threads=2, residency=EVERYTHING)
    executor.allocate_kv(tied.pages.num_blocks, tied.pages.page_size, "f16")
    expected = tied.steps(tied.resident)
    assert np.array_equal(tied.steps(executor), expected)
    for size, what in ((source.file.layer(2).offset + 100, "layer 2"), (4096, "the embedding")):
        os.truncate(copy, size)
        with pytest.raises(ExecutorError) as error:
            tied.steps(executor, (1,) * 3)  # what was read ahead is still there
        assert str(error.value).startswith(f"{copy}: reading {what}: only ")
        assert str(error.value).endswith(f"; the file has {size} bytes")
        copy.write_bytes(content)
        assert np.array_equal(tied.steps(executor), expected)


def resident_bytes(file: Path) -> int:
    """Of this process's mappings of a file."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name = line.split()[0]
        if not name.endswith(":"):
            inside = line.endswith(str(file))
        elif inside and name == "Rss:":
            found += 1024 * int(line.split()[1])
    return found


def forgotten(file: Path) -> None:
    """Nothing of the file is in the page cache: what is read of it then comes in large pieces."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def test_streamed_sections_are_never_resident(make_tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    path = make_tiny_model(
        "qwen2", hidden_size=512, intermediate_size=1024, vocab_size=4096, num_hidden_layers=LAYERS
    )
    model = StreamedModel(quantized(load(path), 4, 64, True, True), tmp_path)
    tail = 64 << 10  # pages may be larger than those that sections are filled up to
    model.resident.close()
    forgotten(model.file)
    for plan in (EVERYTHING, ResidencyPlan(LAYERS, (0, 2)), ResidencyPlan(LAYERS, (), True)):

        def check(plan: ResidencyPlan = plan) -> bool:
            source = model.open(plan)
            executor = CpuExecutor.from_packed(source, threads=2, residency=plan)
            executor.allocate_kv(model.pages.num_blocks, model.pages.page_size, "f16")
            model.steps(executor)
            streamed = [source.file.layer(layer) for layer in plan.streamed_layers]
            streamed += [source.file.ends] if plan.streamed_head else []
            resident = sum(s.size for s in source.file.sections) - sum(s.size for s in streamed)
            return resident <= resident_bytes(model.file) <= resident + tail

        assert in_child(check) == 0


@pytest.mark.parametrize("section", range(1 + LAYERS))
def test_a_changed_bit_in_a_streamed_section_is_found(
    tied: StreamedModel, tmp_path: Path, section: int
) -> None:
    found = tied.open(None).file.sections[section]
    content = bytearray(tied.file.read_bytes())
    content[found.offset + found.size // 2] ^= 1
    copy = tmp_path / "packed.bin"
    copy.write_bytes(content)
    with pytest.raises(UnusableFile, match=f"the CRC-32 of section {section} differs"):
        open_packed(copy, tied.spec, DIGEST, EVERYTHING)


def test_the_buffers_and_what_a_step_reads_are_known_before(tied: StreamedModel) -> None:
    source = tied.open(EVERYTHING)
    sizes = [section.size for section in source.file.sections[1:]]
    head = source.linear(tied.spec.embedding_name)
    assert buffer_bytes(source, EVERYTHING) == max(sizes)
    assert EVERYTHING.stream_buffer_bytes(sizes, head.block_bytes) == 2 * max(sizes)
    for size in (3 << 20, 3_000_000):  # whole huge pages
        assert EVERYTHING.stream_buffer_bytes([size] * LAYERS, head.block_bytes) == 6 << 20
    assert streamed_bytes(source, EVERYTHING) == sum(sizes) + head.tiles.nbytes
    assert streamed_bytes(source, ResidencyPlan(LAYERS, (1,))) == sizes[1]
    assert ResidencyPlan(LAYERS).stream_buffer_bytes(sizes, head.block_bytes) == 0


@given(layers=st.lists(st.integers(1, 40), min_size=1, max_size=4), tile=st.integers(1, 300))
def test_buffers_hold_a_tile_of_the_head_wherever_it_lies(layers: list[int], tile: int) -> None:
    sizes, tile_bytes = [4096 * n for n in layers], 64 * tile
    plan = ResidencyPlan(len(layers), (), True)
    found = plan.buffer_bytes(sizes, tile_bytes)
    assert found % 4096 == 0
    assert found >= max(sizes)
    assert found >= tile_bytes + 4095


def test_what_cannot_be_streamed_is_refused(
    tied: StreamedModel, make_tiny_model: Callable[..., Path]
) -> None:
    source = tied.open(None)
    with pytest.raises(SettingError, match="residency is for 3 layers; the model has 4"):
        CpuExecutor.from_packed(source, threads=1, residency=ResidencyPlan(3))
    for timeout in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(SettingError, match="read_timeout is"):
            CpuExecutor.from_packed(source, threads=1, residency=EVERYTHING, read_timeout=timeout)
    weights = quantized(load(make_tiny_model("llama", num_hidden_layers=LAYERS)), 4, 64, True, False)
    with pytest.raises(SettingError, match="file of packed weights"):
        CpuExecutor.from_packed(FreshlyPacked(weights), threads=1, residency=EVERYTHING)
    CpuExecutor.from_packed(FreshlyPacked(weights), threads=1, residency=ResidencyPlan(LAYERS)).close()


def test_a_stream_that_does_not_match_its_weights_is_refused(tied: StreamedModel) -> None:
    """The kernels check nothing again."""
    from nybble.runtime.cpu_executor import _config

    source = tied.open(None)
    executor = CpuExecutor.__new__(CpuExecutor)
    executor._spec = tied.spec
    section, head = source.file.layer(1), source.file.ends.tensors[tied.spec.embedding_name]
    tiles = [section.tensors[linear.name] for linear in tied.spec.linears(1)]

    def built(
        layers: list[tuple[int, int, int, list[int]]],
        buffers: int = 2,
        size: int = 1 << 20,
        timeout: float = 1.0,
    ) -> None:
        builder = _kernels.DecoderBuilder(_config(tied.spec, tied.spec.max_position))
        executor._load(builder, source)
        for layer in layers:
            builder.stream_layer(*layer)
        builder.stream_head(head, head)
        file = _kernels.StreamFile(source.file.descriptor, "name", buffers, size, 0, 0, timeout)
        _kernels.Decoder(builder, 1, "", file)

    good = (1, section.offset, section.size, tiles)
    built([good])
    bad: list[list[tuple[int, int, int, list[int]]]] = [
        [(LAYERS, *good[1:])],
        [(-1, *good[1:])],
        [good, good],
        [good, (0, *good[1:])],
        [(1, section.offset + 64, section.size, tiles)],
        [(1, -4096, section.size, tiles)],
        [(1, section.offset, section.size - 4096, tiles)],
        [(1, section.offset, 0, tiles)],
        [(1, section.offset, 1 << 62, tiles)],
        [(1, section.offset, section.size, tiles[:6])],
        [(1, section.offset, section.size, [*tiles[:6], section.offset + section.size])],
        [(1, section.offset, section.size, [section.offset - 64, *tiles[1:]])],
    ]
    for layers in bad:
        with pytest.raises(ValueError, match=r"layer|section|tiles"):
            built(layers)
    for settings_ in ({"buffers": 1}, {"size": section.size - 4096}, {"size": 1 << 60}, {"timeout": 0.0}):
        with pytest.raises(ValueError, match=r"buffers|buffer_bytes|timeout"):
            built([good], **settings_)
    builder = _kernels.DecoderBuilder(_config(tied.spec, tied.spec.max_position))
    with pytest.raises(ValueError, match="head has not been set"):
        builder.stream_head(head, head)
    with pytest.raises(ValueError, match="lacks a linear layer"):
        builder.stream_layer(*good)
