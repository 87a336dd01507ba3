"""`CpuExecutor`: the same bits however a sequence is run, and near transformers on dequantized weights."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from decoders import (
    FAMILY_CASES,
    MIXED,
    Pages,
    Weights,
    load,
    paged_logits,
    quantized,
    some_ids,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from nybble._kernels import supported_kernels
from nybble.errors import ExecutorError
from nybble.kvcache import KvCache, block_table
from nybble.quant.packing import QuantizedTensor
from nybble.runtime.batch import Batch, prompt_batch
from nybble.runtime.cpu_executor import CpuExecutor
from nybble.runtime.executor import KvDtype

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


@pytest.fixture(scope="module", params=["int16", "f16", "int8", "f32"])
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


def of_family(
    case: str, make_tiny_model: Callable[..., Path]
) -> tuple[Weights, list[int], NDArray[np.float32]]:
    """A model, a prompt, and its logits when it runs at once on one thread."""
    family, overrides = FAMILY_CASES[case]
    weights = quantized(load(make_tiny_model(family, **overrides)), 4, 32, False, False)
    ids = some_ids(weights.spec.vocab_size, LENGTH)
    one = CpuExecutor(weights, threads=1)
    logits = paged_logits(one, ids, LENGTH)
    one.close()
    return weights, ids, logits


@pytest.mark.parametrize("case", FAMILY_CASES)
def test_a_familys_bits_depend_on_no_chunks_batch_threads_or_instruction_set(
    case: str, make_tiny_model: Callable[..., Path]
) -> None:
    weights, ids, expected = of_family(case, make_tiny_model)
    for isa in supported_kernels():
        executor = CpuExecutor(weights, threads=3, isa=isa)
        assert np.array_equal(paged_logits(executor, ids, LENGTH - 3), expected)
        pages = Pages(weights.spec, 2, LENGTH)
        executor.allocate_kv(pages.num_blocks, pages.page_size, "f32")
        for begin in range(0, LENGTH, 50):
            chunks = [(0, begin, ids[begin : begin + 50]), (1, begin // 10, ids[begin : begin + 5])]
            assert np.array_equal(executor.step(pages.batch(chunks))[:50], expected[begin : begin + 50])
        executor.close()


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_which_rows_are_wanted_changes_no_bit(
    executor: CpuExecutor,
    weights: Weights,
    ids: list[int],
    kv_dtype: KvDtype,
    whole: NDArray[np.float32],
    data: st.DataObject,
) -> None:
    """Of what comes after the last layer's keys and values, only theirs is computed."""
    pages = Pages(weights.spec, 2, LENGTH)
    executor.allocate_kv(pages.num_blocks, pages.page_size, kv_dtype)
    begin, other = 0, data.draw(st.integers(0, 30))
    while begin < LENGTH:
        end = begin + data.draw(st.sampled_from([1, 2, 17, 40, LENGTH]))
        chunk = ids[begin:end]
        step = [(0, begin, chunk)]
        if begin == 0 and other > 0:
            step.append((1, 0, ids[:other]))
        rows = data.draw(st.lists(st.integers(0, len(chunk) - 1), max_size=4))
        batch = replace(pages.batch(step), logit_rows=np.array(rows, np.int32))
        assert np.array_equal(executor.step(batch), whole[begin:end][rows])
        begin = end


@pytest.mark.parametrize("case", FAMILY_CASES)
def test_a_familys_bits_do_not_depend_on_the_wanted_rows(
    case: str, make_tiny_model: Callable[..., Path]
) -> None:
    weights, ids, expected = of_family(case, make_tiny_model)
    executor = CpuExecutor(weights, threads=3)
    pages = Pages(weights.spec, 1, LENGTH)
    executor.allocate_kv(pages.num_blocks, pages.page_size, "f32")
    begin = 0
    for count, rows in ((270, [269, 3, 3]), (10, []), (1, []), (1, [0]), (15, [14, 0]), (3, [0, 1, 2])):
        batch = pages.batch([(0, begin, ids[begin : begin + count])])
        logits = executor.step(replace(batch, logit_rows=np.array(rows, np.int32)))
        assert np.array_equal(logits, expected[begin : begin + count][rows])
        begin += count
    executor.close()


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
