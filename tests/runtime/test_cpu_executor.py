"""`CpuExecutor`: the same bits however a sequence is run, and near transformers on dequantized weights."""

import resource
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoders import (
    CASES,
    FAMILY_CASES,
    MIXED,
    UNUSUAL,
    Pages,
    Weights,
    load,
    mean_kl,
    paged_logits,
    quantized,
    read_config,
    some_ids,
    transformers_logits,
)
from forked import in_child
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from nybble._kernels import supported_kernels
from nybble.errors import DoesNotFitError, ExecutorError, SettingError, UnsupportedModelError
from nybble.kvcache import KvCache, block_table
from nybble.models.spec import MixtureSpec, ModelSpec, RopeSpec
from nybble.quant.packing import QuantizedTensor
from nybble.runtime.batch import Batch, prompt_batch
from nybble.runtime.cpu_executor import CpuExecutor
from nybble.runtime.executor import KvDtype
from nybble.runtime.packed_weights import pack

LENGTH = 300  # over one attention segment of 256 tokens, and over 32 tokens where the matrix product changes


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


@given(st.data())
@settings(max_examples=15, deadline=None)
def test_pages_that_sequences_share_are_read_once_with_the_same_bits(
    weights: Weights, kv_dtype: KvDtype, data: st.DataObject
) -> None:
    """Sequences that begin as another does, in its pages, decode together: in a tree of whole segments."""
    executor = CpuExecutor(weights, threads=data.draw(st.integers(1, 3)), max_position=1024)
    vocab, count = weights.spec.vocab_size, data.draw(st.integers(2, 7))
    pages = Pages(weights.spec, count, 1024)
    executor.allocate_kv(pages.num_blocks, pages.page_size, kv_dtype)
    texts: list[list[int]] = []
    alone = []
    for sequence in range(count):
        shared, parent = 0, data.draw(st.integers(0, max(0, sequence - 1)))
        if sequence > 0:
            shared = data.draw(st.integers(0, (len(texts[parent]) - 1) // 256)) * 256
            pages.table[:, sequence, : shared // 16] = pages.table[:, parent, : shared // 16]
        own = data.draw(st.sampled_from([1, 17, 255, 256, 300, 520]))
        text = (texts[parent][:shared] if shared else []) + some_ids(vocab, 600)[sequence * 7 :][:own]
        text = text[:1024]
        texts.append(text)
        # With its suffix in one chunk nothing of it is a decode.
        logits = executor.step(pages.batch([(sequence, shared, text[shared:])]))
        alone.append(logits[-1].copy())
    order = data.draw(st.permutations(range(count)))
    together = executor.step(pages.batch([(s, len(texts[s]) - 1, texts[s][-1:]) for s in order]))
    assert np.array_equal(together, np.array([alone[s] for s in order]))
    executor.close()


def test_a_token_at_a_time_gives_the_same_bits(
    executor: CpuExecutor, ids: list[int], kv_dtype: KvDtype, whole: NDArray[np.float32]
) -> None:
    assert np.array_equal(paged_logits(executor, ids, 1, kv_dtype), whole)


def test_the_best_tokens_are_those_of_numpy(
    executor: CpuExecutor, weights: Weights, ids: list[int], kv_dtype: KvDtype
) -> None:
    pages = Pages(weights.spec, 1, LENGTH)
    executor.allocate_kv(pages.num_blocks, pages.page_size, kv_dtype)
    for begin, end in ((0, 40), (40, 41), (41, 41 + 7)):
        logits = executor.step(pages.batch([(0, begin, ids[begin:end])]))
        assert executor.best_tokens == logits.argmax(axis=1).tolist()


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


@pytest.mark.parametrize("case", FAMILY_CASES)
def test_a_familys_bits_depend_on_no_chunks_batch_threads_or_instruction_set(
    case: str, make_tiny_model: Callable[..., Path]
) -> None:
    family, overrides = FAMILY_CASES[case]
    weights = quantized(load(make_tiny_model(family, **overrides)), 4, 32, False, False)
    ids = some_ids(weights.spec.vocab_size, LENGTH)
    one = CpuExecutor(weights, threads=1)
    expected = paged_logits(one, ids, LENGTH)
    one.close()
    for isa in supported_kernels():
        executor = CpuExecutor(weights, threads=3, isa=isa)
        assert np.array_equal(paged_logits(executor, ids, LENGTH - 3), expected)
        pages = Pages(weights.spec, 2, LENGTH)
        executor.allocate_kv(pages.num_blocks, pages.page_size, "f32")
        for begin in range(0, LENGTH, 50):
            chunks = [(0, begin, ids[begin : begin + 50]), (1, begin // 10, ids[begin : begin + 5])]
            assert np.array_equal(executor.step(pages.batch(chunks))[:50], expected[begin : begin + 50])
        executor.close()


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


@pytest.mark.slow
def test_smollm2_stays_near_transformers_over_4096_tokens_of_prose() -> None:
    from nybble.models.open import open_source
    from nybble.quant.calibration import evaluation_text
    from nybble.quant.quality import evaluation_windows, kl_divergence, perplexity
    from nybble.runtime.tokenizer import Tokenizer

    source = open_source("smollm2")
    text = Tokenizer(source.tokenizer_files).encode(evaluation_text(), add_special_tokens=False)
    windows = evaluation_windows(np.asarray(text), 8, 512)
    weights = quantized(load("smollm2"), 4, 32, True, False)
    config = dict(source.config)
    expected = [transformers_logits(config, weights, ids.tolist()) for ids in windows]

    def losses(logits: list[NDArray[np.float32]]) -> NDArray[np.float64]:
        pairs = zip(logits, windows, strict=True)
        return np.array([np.log(perplexity(lambda _, x=x: x[None], ids[None])) for x, ids in pairs])

    executor = CpuExecutor(weights, threads=2)
    bounds: list[tuple[KvDtype, float, float]] = [("f16", 5e-3, 1.008), ("int8", 8e-3, 1.012)]
    for kind, most_kl, most_perplexity in bounds:
        executor.allocate_kv(512 // 16, kv_dtype=kind)
        found = [executor.step(prompt_batch(ids.tolist(), 1, 16)).copy() for ids in windows]
        kl = np.mean([kl_divergence(e, f) for e, f in zip(expected, found, strict=True)])
        assert kl < most_kl
        assert np.exp((losses(found) - losses(expected)).mean()) < most_perplexity
    executor.close()


def test_partial_rotation_soft_caps_and_scales_near_onnx_runtime() -> None:
    from nybble.runtime.ort_executor import OrtExecutor

    spec = UNUSUAL
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
    for group in range(groups):
        executor.copy_blocks(np.array([0, 1], np.int32), np.array([40, 41], np.int32), group)
    copied = replace(last, block_table=np.tile(np.array([40, 41, 79], np.int32), (groups, 1, 1)))
    assert np.array_equal(executor.step(copied), expected)
    data = [executor.read_blocks(np.array([0, 1], np.int32), group) for group in range(groups)]
    assert sum(map(len, data)) == 2 * executor.kv_layout.bytes_per_block
    for group in range(groups):
        executor.write_blocks(np.array([60, 61], np.int32), data[group], group)
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


@pytest.mark.parametrize("isa", supported_kernels())
def test_of_equal_experts_the_lowest_computes_and_no_others_weights_are_read(
    isa: str, make_tiny_model: Callable[..., Path]
) -> None:
    path = make_tiny_model("mixtral", num_local_experts=3, num_experts_per_tok=1)
    weights = quantized(load(path), 4, 32, True, False)
    prefix = "model.layers.1.block_sparse_moe."
    router = np.array(weights.tensors[f"{prefix}gate.weight"])
    router[2] = router[1]  # so the last is never chosen
    weights.tensors[f"{prefix}gate.weight"] = router
    ids = some_ids(weights.spec.vocab_size, 80)

    def found() -> NDArray[np.float32]:
        executor = CpuExecutor(weights, threads=2, isa=isa)
        logits = paged_logits(executor, ids, 60)
        executor.close()
        return logits

    expected = found()
    for expert, reaches in ((2, False), (1, True)):
        for part in ("w1", "w2", "w3"):
            name = f"{prefix}experts.{expert}.{part}.weight"
            tensor = weights.tensors[name]
            assert isinstance(tensor, QuantizedTensor)
            weights.tensors[name] = replace(tensor, scales=np.full_like(tensor.scales, np.nan))
        assert np.isfinite(expected).all()
        assert np.array_equal(found(), expected, equal_nan=True) != reaches


def odd_spec(**sizes: Any) -> ModelSpec:
    """Sizes that fill no lane, slice or tile."""
    shape = {
        "vocab_size": 203,
        "hidden_size": 72,
        "intermediate_size": 90,
        "num_layers": 2,
        "num_heads": 6,
        "num_kv_heads": 3,
        "head_dim": 10,
        "max_position": 512,
    }
    shape |= sizes
    rope = RopeSpec(theta=10000.0, rotary_dim=6)
    windows = (None,) * shape["num_layers"]
    return ModelSpec(
        model_type="test", norm_eps=1e-5, rope=rope, qk_norm=True, sliding_windows=windows, **shape
    )


def random_weights(spec: ModelSpec, symmetric: bool, permuted: bool) -> Weights:
    rng = np.random.default_rng(6)
    tensors: Any = {
        name: (rng.normal(size=shape) * (shape[1] ** -0.5 if len(shape) == 2 else 1)).astype(np.float32)
        for name, shape in spec.tensors().items()
    }
    return quantized(Weights(spec, tensors), 4, 32, symmetric, permuted)


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("hidden_size", [40, 72, 90])
def test_sizes_that_fill_no_tile(hidden_size: int, permuted: bool) -> None:
    from nybble.runtime.ort_executor import OrtExecutor

    weights = random_weights(odd_spec(hidden_size=hidden_size), permuted, permuted)
    ids = some_ids(weights.spec.vocab_size, 40)
    with OrtExecutor.from_weights(weights, threads=1, accuracy_level=0) as reference:
        expected = paged_logits(reference, ids)
    for isa in supported_kernels():
        executor = CpuExecutor(weights, threads=2, isa=isa)
        found = paged_logits(executor, ids, 33)
        assert mean_kl(expected, found) < 5e-3
        assert np.array_equal(found, paged_logits(executor, ids, 3))
        executor.close()


@pytest.mark.parametrize("sharing", [(0, None, 0), (None, 0, 0), (0, 0, 1), (0, 1, None)])
def test_linear_layers_share_an_input_only_in_the_same_order(sharing: tuple[int | None, ...]) -> None:
    from nybble.runtime.ort_executor import OrtExecutor

    weights = random_weights(odd_spec(), False, False)
    columns = weights.spec.hidden_size
    orders = [np.random.default_rng(n).permutation(columns).astype(np.int32) for n in (1, 2)]
    for layer in range(weights.spec.num_layers):
        for linear, order in zip(weights.spec.linears(layer), sharing, strict=False):  # q, k and v come first
            tensor = weights.tensors[linear.name]
            assert isinstance(tensor, QuantizedTensor)
            if order is not None:
                weights.tensors[linear.name] = replace(tensor, permutation=orders[order])
    ids = some_ids(weights.spec.vocab_size, 40)
    with OrtExecutor.from_weights(weights, threads=1, accuracy_level=0) as reference:
        expected = paged_logits(reference, ids)
    executor = CpuExecutor(weights, threads=2)
    assert mean_kl(expected, paged_logits(executor, ids, 33)) < 5e-3
    executor.close()


def test_a_permutation_of_very_many_columns() -> None:
    spec = odd_spec(hidden_size=32, intermediate_size=90_000, num_layers=1)
    weights = random_weights(spec, True, True)
    ids = some_ids(spec.vocab_size, 40)
    one, many = (CpuExecutor(weights, threads=threads) for threads in (1, 8))
    assert np.array_equal(paged_logits(one, ids, 33), paged_logits(many, ids, 33))
    one.close()
    many.close()


@pytest.mark.parametrize("isa", supported_kernels())
@pytest.mark.parametrize(
    "name", ["model.norm.weight", "model.layers.0.input_layernorm.weight", "model.layers.1.mlp.up_proj.bias"]
)
def test_what_is_no_number_reaches_the_logits(weights: Weights, ids: list[int], name: str, isa: str) -> None:
    spec = replace(weights.spec, mlp_bias=True)
    tensors = {n: np.zeros(shape, np.float32) for n, shape in spec.tensors().items() if len(shape) == 1}
    tensors |= weights.tensors  # type: ignore[arg-type]
    for where in (0, 3, 17, 63):
        broken = np.array(tensors[name], np.float32)
        broken[where] = np.nan
        executor = CpuExecutor(Weights(spec, {**tensors, name: broken}), threads=1, isa=isa)
        assert np.isnan(paged_logits(executor, ids[:20], 18)).all()
        executor.close()


def test_copies_read_all_pages_before_they_write_any(executor: CpuExecutor) -> None:
    executor.allocate_kv(4)
    size = executor.kv_layout.group_bytes[0]
    pages = np.arange(3, dtype=np.int32)
    executor.write_blocks(pages, b"".join(bytes([n]) * size for n in (1, 2, 3)))
    executor.copy_blocks(pages[:2], pages[1:])
    assert executor.read_blocks(pages) == b"".join(bytes([n]) * size for n in (1, 1, 2))
    with pytest.raises(ExecutorError, match="dst"):
        executor.copy_blocks(pages[:2], np.zeros(2, np.int32))


def test_pages_of_a_window_group_are_its_own(executor: CpuExecutor, weights: Weights) -> None:
    """Whatever is done to one group's pages, the others' hold what they held."""
    groups = range(len(weights.spec.window_groups))
    executor.allocate_kv(4)
    pages, sizes = np.arange(4, dtype=np.int32), executor.kv_layout.group_bytes
    of_layer = weights.spec.group_of_layer
    assert len(groups) == len(sizes) > 1
    assert sizes == tuple(of_layer.count(g) * sum(sizes) // len(of_layer) for g in groups)
    content = [[bytes([16 * g + p]) * sizes[g] for p in pages] for g in groups]
    for group in groups:
        executor.write_blocks(pages, b"".join(content[group]), group)
    for group in groups:
        executor.copy_blocks(pages[group : group + 1], pages[3:], group)
        content[group][3] = content[group][group]
        executor.copy_blocks(pages[:2], pages[1::-1].copy(), group)
        content[group][:2] = content[group][1::-1]
        assert [executor.read_blocks(pages, g) for g in groups] == [b"".join(each) for each in content]
    with pytest.raises(ExecutorError, match=rf"^group is {len(groups)}; expected 0 to 1"):
        executor.read_blocks(pages, len(groups))


def test_pages_that_left_the_window_need_not_be_there(
    executor: CpuExecutor, weights: Weights, ids: list[int]
) -> None:
    """The same bits without them: decodes and chunks, over the border of a segment."""
    windows = weights.spec.window_groups
    expected = paged_logits(executor, ids, kv_dtype="f16")
    executor.allocate_kv(80, 16, "f16")
    blocks, found, start = KvCache(80, 16, windows).sequence(), [], 0
    for count in [1, 40, 1, 1, 17, 3] * 20:
        count = min(count, len(ids) - start)
        if count == 0:
            break
        blocks.append(count)
        batch = Batch(
            np.array(ids[start : start + count], np.int32),
            np.array([0, count], np.int32),
            np.array([start], np.int32),
            block_table([blocks]),
            np.array(blocks.slots(start, count), np.int32),
            np.arange(count, dtype=np.int32),
        )
        found.append(executor.step(batch).copy())
        start += count
        blocks.release_window(start)
    assert any(-1 in table for table in blocks.tables)
    assert np.array_equal(np.concatenate(found), expected)


MIXTURE = MixtureSpec((1,), 5, 2, 40, True, 56)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("bits", "group_size", "symmetric"), [(4, 32, False), (4, -1, True), (8, 64, False)])
def test_the_plan_counts_the_bytes_that_are_held(
    bits: int, group_size: int, symmetric: bool, tied: bool, kv_dtype: KvDtype
) -> None:
    from nybble.devices import RunSettings, load_profile, plan_memory
    from nybble.quant.recipe import Recipe

    spec = replace(odd_spec(), tied_embeddings=tied, norm_placement="around" if tied else "before")
    spec = replace(spec, mixture=MIXTURE if tied else None)
    tensors: Any = {name: np.ones(shape, np.float32) for name, shape in spec.tensors().items()}
    weights = quantized(Weights(spec, tensors), bits, group_size, symmetric, False)
    held = sum(
        pack(tensor).tiles.nbytes if isinstance(tensor, QuantizedTensor) else 4 * tensor.size
        for tensor in weights.tensors.values()
    )
    recipe = Recipe(bits=bits, group_size=group_size, symmetric=symmetric)
    profile = replace(load_profile("laptop-cpu"), page_size=256)
    plan = plan_memory(
        RunSettings(spec, recipe, profile, context=70, sequences=3, kv_dtype=kv_dtype, executor="cpu")
    )
    executor = CpuExecutor(weights, threads=1)
    executor.allocate_kv(plan.num_pages, plan.page_size, plan.kv_dtype)
    assert (plan.weights, plan.num_pages) == (held, 15)
    assert plan.kv == plan.num_pages * executor.kv_layout.bytes_per_block
    executor.close()


@pytest.mark.parametrize("threads", [1, 5])
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"num_heads": 8, "num_kv_heads": 1, "head_dim": 96},
        {"window_rope": RopeSpec(1e4, 10), "sliding_windows": (8, None)},
        {"mixture": MIXTURE},
        {"mixture": MixtureSpec((0, 1), 20, 3, 140, False)},
    ],
)
def test_the_plan_counts_the_buffers_of_a_step(sizes: dict[str, Any], threads: int) -> None:
    from nybble.devices import RunSettings, load_profile
    from nybble.devices.cpu_memory import step_bytes
    from nybble.quant.recipe import Recipe

    spec = replace(odd_spec(), qk_norm=False, max_position=1 << 16, **sizes)
    tensors: Any = {name: np.ones(shape, np.float32) for name, shape in spec.tensors().items()}
    weights = quantized(Weights(spec, tensors), 4, 32, True, False)
    run = RunSettings(
        spec, Recipe(), load_profile("laptop-cpu"),
        context=50_000, sequences=20, token_budget=99, threads=threads, executor="cpu",
    )  # fmt: skip
    executor = CpuExecutor(weights, threads=threads, max_position=run.length)
    executor._decoder.reserve(run.tokens, run.sequences, run.logit_rows)
    held, planned = executor._decoder.step_bytes, step_bytes(run)
    assert held <= planned <= held + threads * (256 << 10)  # the scratch of small models is a bound
    executor.close()
