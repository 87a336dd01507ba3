"""`OrtExecutor` as the engine uses it: the contract of `step`."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ort_steps import BLOCKS, IDS, PAGE, VOCAB, make_batch, make_weights

from nybble.runtime.batch import Batch
from nybble.runtime.ort_executor import OrtExecutor
from nybble.runtime.ort_runs import split_step


def test_decodes_and_chunks_of_any_length_share_a_step(executor: OrtExecutor) -> None:
    alone = [executor.step(make_batch([(0, IDS[:n])])) for n in (1, 9, 20)]
    executor.allocate_kv(BLOCKS, PAGE, "f32")
    executor.step(make_batch([(0, IDS[:0]), (0, IDS[:5]), (0, []), (0, IDS[:3])], rows=[]))
    found = executor.step(make_batch([(0, IDS[:1]), (5, IDS[5:9]), (0, []), (3, IDS[3:20])]))
    expected = np.concatenate([alone[0], alone[1][5:], alone[2][3:]])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def test_logits_come_in_the_order_of_logit_rows(executor: OrtExecutor) -> None:
    chunks = [(0, IDS[:2]), (0, IDS[2:14]), (0, IDS[14:15])]
    every = executor.step(make_batch(chunks))
    rows = [14, 3, 3, 0, 13, 1]
    np.testing.assert_allclose(executor.step(make_batch(chunks, rows)), every[rows], rtol=0, atol=1e-4)


def test_no_rows_and_no_tokens(executor: OrtExecutor) -> None:
    expected = executor.step(make_batch([(0, IDS[:8])]))[-1]
    executor.allocate_kv(BLOCKS, PAGE, "f32")
    assert executor.step(make_batch([(0, IDS[:7])], rows=[])).shape == (0, VOCAB)
    np.testing.assert_allclose(executor.step(make_batch([(7, IDS[7:8])]))[0], expected, rtol=0, atol=1e-4)
    assert executor.step(make_batch([(8, [])])).shape == (0, VOCAB)
    assert executor.step(make_batch([])).shape == (0, VOCAB)


def test_long_chunks_run_in_pieces(onnx_path: Path, executor: OrtExecutor) -> None:
    batch = make_batch([(0, IDS[:20]), (0, IDS[:11]), (0, IDS[:1])])
    expected = executor.step(batch)
    with OrtExecutor.from_file(onnx_path, threads=1, accuracy_level=0, max_run_tokens=4) as pieces:
        pieces.allocate_kv(BLOCKS, PAGE, "f32")
        np.testing.assert_allclose(pieces.step(batch), expected, rtol=0, atol=1e-4)


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), max_size=8),
    limit=st.integers(1, 16),
    run_cost=st.sampled_from([0, 3, 1000]),
)
def test_runs_cover_every_token_once_in_order_and_are_bounded(
    lengths: list[int], limit: int, run_cost: int
) -> None:
    tokens = np.arange(sum(lengths), dtype=np.int32)
    count = len(lengths)
    batch = Batch(
        token_ids=tokens,
        cu_seqlens=np.cumsum([0, *lengths]).astype(np.int32),
        past_lens=np.arange(count, dtype=np.int32),
        block_table=np.arange(count * 20, dtype=np.int32).reshape(1, count, 20),
        slot_mapping=tokens[None],
        logit_rows=tokens[::-1].copy(),
    )
    seen: list[int] = []
    places: list[int] = []
    for run in split_step(batch, PAGE, limit, run_cost=run_cost):
        part, sizes = run.batch, np.diff(run.batch.cu_seqlens)
        assert sizes.min() >= 1
        assert len(sizes) * sizes.max() <= limit
        assert 2 * sizes.min() > sizes.max()
        np.testing.assert_array_equal(part.slot_mapping[0], part.token_ids)
        assert part.block_table.shape[2] * PAGE < (part.past_lens + sizes).max() + PAGE
        for row, (begin, past) in enumerate(zip(part.cu_seqlens, part.past_lens, strict=False)):
            sequence = part.block_table[0, row, 0] // 20
            assert past == sequence + part.token_ids[begin] - batch.cu_seqlens[sequence]
        np.testing.assert_array_equal(part.token_ids[part.logit_rows], batch.logit_rows[run.logits])
        seen += part.token_ids.tolist()
        places += run.logits.tolist()
    assert sorted(seen) == tokens.tolist()
    assert sorted(places) == tokens.tolist()
    for begin, end in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False):
        own = [token for token in seen if begin <= token < end]
        assert own == sorted(own)


def decodes(contexts: list[int]) -> Batch:
    """One token of each sequence, whose contexts with it are these; tables of page 0."""
    count, width = len(contexts), -(-max(contexts) // PAGE)
    return Batch(
        token_ids=np.zeros(count, np.int32),
        cu_seqlens=np.arange(count + 1, dtype=np.int32),
        past_lens=np.array(contexts, np.int32) - 1,
        block_table=np.zeros((1, count, width), np.int32),
        slot_mapping=np.arange(count, dtype=np.int32)[None],
        logit_rows=np.arange(count, dtype=np.int32),
    )


def runs_of(contexts: list[int], run_cost: int) -> list[list[int]]:
    runs = split_step(decodes(contexts), PAGE, run_cost=run_cost)
    return [(run.batch.past_lens + 1).tolist() for run in runs]


def test_long_contexts_run_apart_where_that_saves_more_than_a_run_costs() -> None:
    assert runs_of([60, 4000, 64, 62], 1000) == [[4000], [64, 62, 60]]
    assert runs_of([60, 390, 64, 62], 1000) == [[390, 64, 62, 60]]
    assert runs_of([4000, 3900, 2000, 100, 90], 1000) == [[4000, 3900], [2000], [100, 90]]


@given(contexts=st.lists(st.integers(1, 5000), min_size=1, max_size=12), run_cost=st.integers(0, 3000))
def test_runs_by_context_cost_no_more_than_one(contexts: list[int], run_cost: int) -> None:
    runs = runs_of(contexts, run_cost)
    assert sorted(context for run in runs for context in run) == sorted(contexts)
    cost = sum(run_cost + len(run) * max(run) for run in runs)
    assert cost <= run_cost + len(contexts) * max(contexts)


def test_a_long_context_beside_short_ones_gives_the_logits_of_each_alone(
    executor: OrtExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [IDS[:3], IDS[:23], IDS[5:8], IDS[2:4]]
    monkeypatch.setattr(executor, "_run_cost", 40)
    alone = [executor.step(make_batch([(0, ids)]))[-1] for ids in prompts]
    executor.allocate_kv(BLOCKS, PAGE, "f32")
    executor.step(make_batch([(0, ids[:-1]) for ids in prompts], rows=[]))
    last = make_batch([(len(ids) - 1, ids[-1:]) for ids in prompts])
    assert len(list(split_step(last, PAGE, run_cost=executor._run_cost))) == 2
    np.testing.assert_allclose(executor.step(last), alone, rtol=0, atol=1e-4)


def test_memory_built_and_mapped_weights_give_the_same_bits(onnx_path: Path) -> None:
    found = []
    for make in (
        lambda: OrtExecutor.from_file(onnx_path, threads=1),
        lambda: OrtExecutor.from_weights(make_weights(), threads=1),
    ):
        with make() as executor:
            executor.allocate_kv(BLOCKS, PAGE, "f32")
            found.append(executor.step(make_batch([(0, IDS)])))
    np.testing.assert_array_equal(*found)


def test_accuracy_level_4_rounds_activations(onnx_path: Path, executor: OrtExecutor) -> None:
    expected = executor.step(make_batch([(0, IDS)]))
    with OrtExecutor.from_file(onnx_path, threads=1) as rounded:
        rounded.allocate_kv(BLOCKS, PAGE, "f32")
        difference = np.abs(rounded.step(make_batch([(0, IDS)])) - expected).max()
    assert 1e-3 < difference < 0.2 * np.abs(expected).max()
