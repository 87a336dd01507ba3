"""`CpuExecutor` where it is used wrongly, or the system gives less than it asks for."""

import resource
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoders import (
    MIXED,
    Weights,
    load,
    paged_logits,
    quantized,
    some_ids,
)
from forked import in_child

from nybble.errors import DoesNotFitError, ExecutorError, SettingError, UnsupportedModelError
from nybble.quant.packing import QuantizedTensor
from nybble.runtime.batch import Batch, prompt_batch
from nybble.runtime.cpu_executor import CpuExecutor

LENGTH = 300  # over one attention segment of 256 tokens


@pytest.fixture(scope="module")
def weights(make_tiny_model: Callable[..., Path]) -> Weights:
    """Two window groups, grouped heads, biases, a short last group of columns."""
    path = make_tiny_model("qwen2", use_sliding_window=True, tie_word_embeddings=True, **MIXED)
    return quantized(load(path), 4, 64, False, False)


@pytest.fixture(scope="module")
def executor(weights: Weights) -> Iterator[CpuExecutor]:
    executor = CpuExecutor(weights, threads=2)
    yield executor
    executor.close()


@pytest.fixture(scope="module")
def ids(weights: Weights) -> list[int]:
    return some_ids(weights.spec.vocab_size, LENGTH)


BROKEN: dict[str, Callable[[Batch], dict[str, Any]]] = {
    "token_ids": lambda b: {"token_ids": b.token_ids + 10_000},
    "token_ids dtype": lambda b: {"token_ids": b.token_ids.astype(np.int64)},
    "token_ids shape": lambda b: {"token_ids": b.token_ids[None]},
    "token_ids stride": lambda b: {"token_ids": np.repeat(b.token_ids, 2)[::2]},
    "cu_seqlens": lambda b: {"cu_seqlens": b.cu_seqlens + 1},
    "cu_seqlens length": lambda b: {"cu_seqlens": b.cu_seqlens[:1]},
    "past_lens": lambda b: {"past_lens": b.past_lens + 1_000_000},
    "past_lens negative": lambda b: {"past_lens": b.past_lens - 1},
    "block_table": lambda b: {"block_table": b.block_table + 1_000},
    "block_table unmapped": lambda b: {"block_table": np.full_like(b.block_table, -1)},
    "block_table narrow": lambda b: {"block_table": b.block_table[:, :, :1].copy()},
    "block_table groups": lambda b: {"block_table": b.block_table[:1].copy()},
    "slot_mapping": lambda b: {"slot_mapping": b.slot_mapping + 100_000},
    "slot_mapping length": lambda b: {"slot_mapping": b.slot_mapping[:, 1:].copy()},
    "logit_rows": lambda b: {"logit_rows": b.logit_rows + 100},
}


@pytest.mark.parametrize("broken", BROKEN)
def test_arrays_that_break_the_contract_are_named(
    executor: CpuExecutor, weights: Weights, ids: list[int], broken: str
) -> None:
    executor.allocate_kv(20, 16, "f16")
    batch = prompt_batch(ids[:40], len(weights.spec.window_groups), 16)
    executor.step(batch)
    with pytest.raises(ExecutorError, match=broken.split()[0]):
        executor.step(replace(batch, **BROKEN[broken](batch)))


@pytest.mark.parametrize("group_size", [16, 48])
def test_groups_that_no_tile_expresses_are_named(weights: Weights, group_size: int) -> None:
    name = "model.layers.1.self_attn.o_proj.weight"
    tensor = weights.tensors[name]
    assert isinstance(tensor, QuantizedTensor)
    scales = np.ones((tensor.out_features, -(-tensor.in_features // group_size)), np.float16)
    other = replace(tensor, scales=scales, zeros=None, group_size=group_size)
    with pytest.raises(
        UnsupportedModelError, match=rf"^tensor {name} has groups of {group_size} .* multiple of 32"
    ):
        CpuExecutor(Weights(weights.spec, {**weights.tensors, name: other}), threads=1)


def test_settings_out_of_range(weights: Weights, executor: CpuExecutor) -> None:
    with pytest.raises(SettingError, match="avx9000"):
        CpuExecutor(weights, threads=1, isa="avx9000")
    with pytest.raises(SettingError, match="threads"):
        CpuExecutor(weights, threads=0)
    with pytest.raises(SettingError, match="page_size"):
        executor.allocate_kv(4, 256, "f16")
    with pytest.raises(SettingError, match="kv_dtype"):
        executor.allocate_kv(4, 16, "f64")  # type: ignore[arg-type]


def test_a_forked_child_runs_too(weights: Weights, ids: list[int]) -> None:
    executor = CpuExecutor(weights, threads=2)
    expected = paged_logits(executor, ids[:40])
    assert in_child(lambda: np.array_equal(paged_logits(executor, ids[:40]), expected)) == 0
    assert np.array_equal(paged_logits(executor, ids[:40]), expected)
    executor.close()


def limit_memory(more: int) -> None:
    """Lets this process have only so many more bytes of address space."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + more, used + more))


def test_a_forked_child_runs_and_closes_several(weights: Weights, ids: list[int]) -> None:
    executors = [CpuExecutor(weights, threads=4) for _ in range(3)]
    expected = paged_logits(executors[0], ids[:40])

    def check() -> bool:
        same = [np.array_equal(paged_logits(e, ids[:40]), expected) for e in executors[:2]]
        for executor in executors:
            executor.close()
        return all(same)

    assert [in_child(check) for _ in range(3)] == [0, 0, 0]
    for executor in executors:
        executor.close()


def test_threads_that_the_system_refuses_are_a_setting_error(weights: Weights) -> None:
    def check() -> bool:
        limit_memory(256 << 20)
        with pytest.raises(SettingError, match="threads is 1000"):
            CpuExecutor(weights, threads=1000)
        return True

    assert in_child(check) == 0


def test_running_out_of_memory_is_reported_and_leaves_the_executor_usable(
    weights: Weights, ids: list[int]
) -> None:
    executor = CpuExecutor(weights, threads=1)
    expected = paged_logits(executor, ids[:40])
    batch = prompt_batch(ids[:40], len(weights.spec.window_groups), 16)

    def check() -> bool:
        limit_memory(256 << 20)
        with pytest.raises(DoesNotFitError, match="sequences"):
            executor.reserve(1 << 26, 1)
        again = executor.step(batch)  # the cache is still there; the buffers are made anew
        with pytest.raises(DoesNotFitError, match="pages"):
            executor.allocate_kv(1 << 20)
        with pytest.raises(ExecutorError, match="allocate"):
            executor.step(batch)
        executor.allocate_kv(8, kv_dtype="f32")
        return np.array_equal(again, expected) and np.array_equal(executor.step(batch), expected)

    assert in_child(check) == 0
    executor.close()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_a_long_context_takes_memory_only_where_it_is_used(weights: Weights, ids: list[int]) -> None:
    # A heap with untouched room, below a block that is kept: calloc would take it, and clear it.
    heap = [np.empty(100_000, np.uint8) for _ in range(1000)]
    kept = heap.pop()
    heap.clear()
    before = resident_bytes()
    executor = CpuExecutor(weights, threads=8, max_position=1 << 24)
    executor.reserve(16, 1)
    paged_logits(executor, ids, LENGTH - 3)
    assert resident_bytes() - before < 16 << 20
    executor.close()
    assert len(kept) == 100_000


@pytest.mark.parametrize("num_blocks", [0, -1, 1 << 27, 1 << 40])
def test_caches_of_no_possible_size(executor: CpuExecutor, num_blocks: int) -> None:
    with pytest.raises(SettingError, match="num_blocks"):
        executor.allocate_kv(num_blocks)


def test_a_closed_executor_says_so(weights: Weights, ids: list[int]) -> None:
    executor = CpuExecutor(weights, threads=2)
    executor.allocate_kv(8)
    executor.close()
    executor.close()
    batch = prompt_batch(ids[:8], len(weights.spec.window_groups), 16)
    for use in (
        lambda: executor.step(batch),
        lambda: executor.allocate_kv(8),
        lambda: executor.reserve(8, 1),
        lambda: executor.read_blocks(np.zeros(1, np.int32)),
    ):
        with pytest.raises(ExecutorError, match="closed"):
            use()
