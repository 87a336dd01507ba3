"""`CpuExecutor`: the same bits however a sequence is run, and near transformers on dequantized weights."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoders import (
    CASES,
    MIXED,
    Pages,
    Weights,
    load,
    paged_logits,
    quantized,
    read_config,
    some_ids,
    transformers_logits,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from nybble._kernels import supported_kernels
from nybble.errors import ExecutorError, SettingError
from nybble.models.spec import ModelSpec, RopeSpec
from nybble.runtime.batch import Batch, prompt_batch
from nybble.runtime.cpu_executor import CpuExecutor
from nybble.runtime.executor import KvDtype

LENGTH = 300  # over one attention segment of 256 tokens, and over 16 tokens where the matrix product changes


def log_softmax(x: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = x.astype(np.float64) - x.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def mean_kl(expected: NDArray[np.float32], found: NDArray[np.float32]) -> float:
    one, other = log_softmax(expected), log_softmax(found)
    return float((np.exp(one) * (one - other)).sum(-1).mean())


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


@pytest.fixture(scope="module", params=["f16", "int8", "f32"])
def kv_dtype(request: pytest.FixtureRequest) -> KvDtype:
    kind: KvDtype = request.param
    return kind


@pytest.fixture(scope="module")
def ids(weights: Weights) -> list[int]:
    return some_ids(weights.spec.vocab_size, LENGTH)


@pytest.fixture(scope="module")
def whole(weights: Weights, ids: list[int], kv_dtype: KvDtype) -> NDArray[np.float32]:
    """All logits of one prompt run at once on one thread, in pages in order."""
    executor = CpuExecutor(weights, threads=1)
    pages = Pages(weights.spec, 1, LENGTH)
    pages.table = np.arange(pages.table.size, dtype=np.int32).reshape(pages.table.shape)
    executor.allocate_kv(pages.num_blocks, pages.page_size, kv_dtype)
    logits = executor.step(pages.batch([(0, 0, ids)])).copy()
    executor.close()
    return logits


@given(
    cuts=st.lists(st.integers(1, LENGTH - 1), max_size=12, unique=True).map(sorted),
    others=st.lists(st.integers(1, 40), max_size=4),
)
@settings(max_examples=25, deadline=None)
def test_any_chunks_beside_any_others_give_the_same_bits(
    executor: CpuExecutor,
    weights: Weights,
    ids: list[int],
    kv_dtype: KvDtype,
    whole: NDArray[np.float32],
    cuts: list[int],
    others: list[int],
) -> None:
    pages = Pages(weights.spec, 1 + len(others), LENGTH)
    executor.allocate_kv(pages.num_blocks, pages.page_size, kv_dtype)
    past = [0] * len(others)
    for begin, end in zip([0, *cuts], [*cuts, LENGTH], strict=True):
        chunks = [(0, begin, ids[begin:end])]
        for i, count in enumerate(others):
            if past[i] + count <= LENGTH:
                chunks.append((i + 1, past[i], ids[::-1][past[i] : past[i] + count]))
                past[i] += count
        logits = executor.step(pages.batch(chunks))
        assert np.array_equal(logits[: end - begin], whole[begin:end])


def test_a_token_at_a_time_gives_the_same_bits(
    executor: CpuExecutor, ids: list[int], kv_dtype: KvDtype, whole: NDArray[np.float32]
) -> None:
    assert np.array_equal(paged_logits(executor, ids, 1, kv_dtype), whole)


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_any_number_of_threads_gives_the_same_bits(
    weights: Weights, ids: list[int], kv_dtype: KvDtype, whole: NDArray[np.float32], threads: int
) -> None:
    executor = CpuExecutor(weights, threads=threads)
    assert np.array_equal(paged_logits(executor, ids, LENGTH - 3, kv_dtype), whole)
    executor.close()


@pytest.mark.parametrize("isa", [name for name in supported_kernels() if name != supported_kernels()[0]])
def test_every_instruction_set_gives_the_same_bits(
    weights: Weights, ids: list[int], kv_dtype: KvDtype, whole: NDArray[np.float32], isa: str
) -> None:
    executor = CpuExecutor(weights, threads=2, isa=isa)
    assert executor.isa == isa
    assert np.array_equal(paged_logits(executor, ids, LENGTH - 3, kv_dtype), whole)
    executor.close()


@pytest.mark.parametrize("case", CASES)
def test_near_transformers_on_the_dequantized_weights(
    case: str, make_tiny_model: Callable[..., Path]
) -> None:
    family, overrides = CASES[case]
    path = make_tiny_model(family, **overrides)
    weights = quantized(load(path), 4, 32, True, False)
    ids = some_ids(weights.spec.vocab_size)
    executor = CpuExecutor(weights, threads=1)
    found = paged_logits(executor, ids, kv_dtype="f32")
    executor.close()
    # Activations in 8 bits are all that differs; these random models amplify them more than trained ones.
    assert mean_kl(transformers_logits(read_config(path), weights, ids), found) < 5e-3


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("bits", "group_size"), [(4, 64), (4, 128), (4, -1), (8, 32), (8, 128), (8, -1)])
def test_every_packing_is_near_transformers(
    bits: int, group_size: int, symmetric: bool, permuted: bool, make_tiny_model: Callable[..., Path]
) -> None:
    path = make_tiny_model("qwen2", hidden_size=80, tie_word_embeddings=symmetric)
    weights = quantized(load(path), bits, group_size, symmetric, permuted)
    ids = some_ids(weights.spec.vocab_size)
    executor = CpuExecutor(weights, threads=1)
    found = paged_logits(executor, ids, kv_dtype="f32")
    executor.close()
    assert mean_kl(transformers_logits(read_config(path), weights, ids), found) < 5e-3


def test_partial_rotation_soft_caps_and_scales_near_onnx_runtime() -> None:
    from nybble.runtime.ort_executor import OrtExecutor

    spec = ModelSpec(
        model_type="test",
        vocab_size=200,
        hidden_size=48,
        intermediate_size=80,
        num_layers=3,
        num_heads=6,
        num_kv_heads=3,
        head_dim=20,
        max_position=256,
        norm_eps=1e-5,
        rope=RopeSpec(theta=10000.0, rotary_dim=12),
        activation="relu",
        sliding_windows=(9, None, 9),
        attention_softcap=2.5,
        logit_softcap=4.0,
        embedding_scale=3.0,
        attention_scale=0.3,
    )
    rng = np.random.default_rng(5)
    tensors: Any = {
        name: (rng.normal(size=shape) * (0.2 if len(shape) == 2 else 1)).astype(np.float32)
        for name, shape in spec.tensors().items()
    }
    weights = quantized(Weights(spec, tensors), 8, 32, True, False)
    ids = some_ids(spec.vocab_size)
    with OrtExecutor.from_weights(weights, threads=1, accuracy_level=0) as reference:
        expected = paged_logits(reference, ids)
    executor = CpuExecutor(weights, threads=1)
    found = paged_logits(executor, ids, kv_dtype="f32")
    executor.close()
    assert np.abs(expected).max() > 1
    assert mean_kl(expected, found) < 5e-3


def test_pages_can_be_copied_and_moved(executor: CpuExecutor, weights: Weights, ids: list[int]) -> None:
    groups = len(weights.spec.window_groups)
    executor.allocate_kv(80, 16, "f16")
    executor.step(prompt_batch(ids[:32], groups, 16))
    step = prompt_batch(ids[:33], groups, 16)
    last = replace(
        step,
        token_ids=step.token_ids[32:],
        cu_seqlens=np.array([0, 1], np.int32),
        past_lens=np.array([32], np.int32),
        slot_mapping=np.full((groups, 1), 79 * 16, np.int32),
        block_table=np.tile(np.array([0, 1, 79], np.int32), (groups, 1, 1)),
        logit_rows=np.zeros(1, np.int32),
    )
    expected = executor.step(last).copy()
    executor.copy_blocks(np.array([0, 1], np.int32), np.array([40, 41], np.int32))
    copied = replace(last, block_table=np.tile(np.array([40, 41, 79], np.int32), (groups, 1, 1)))
    assert np.array_equal(executor.step(copied), expected)
    data = executor.read_blocks(np.array([0, 1], np.int32))
    assert len(data) == 2 * executor.kv_layout.bytes_per_block
    executor.write_blocks(np.array([60, 61], np.int32), data)
    moved = replace(last, block_table=np.tile(np.array([60, 61, 79], np.int32), (groups, 1, 1)))
    assert np.array_equal(executor.step(moved), expected)


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
    import os

    executor = CpuExecutor(weights, threads=2)
    expected = paged_logits(executor, ids[:40]).copy()
    child = os.fork()
    if child == 0:
        same = np.array_equal(paged_logits(executor, ids[:40]), expected)
        os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert np.array_equal(paged_logits(executor, ids[:40]), expected)
    executor.close()
