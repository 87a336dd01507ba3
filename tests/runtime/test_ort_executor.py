"""`OrtExecutor` as the engine uses it: the contract of `step`, pages moved about, and what it refuses."""

import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from nybble.errors import ExecutorError, MissingDependencyError, ModelFormatError, SettingError
from nybble.export.onnx_writer import write_onnx
from nybble.export.weights import LogicalTensor
from nybble.models.spec import ModelSpec, RopeSpec
from nybble.quant.packing import QuantizedTensor, quantize_head
from nybble.runtime import ort_session
from nybble.runtime.batch import Batch
from nybble.runtime.ort_executor import OrtExecutor
from nybble.runtime.ort_runs import split_step

PAGE, BLOCKS, VOCAB = 4, 24, 90


@dataclass
class Weights:
    spec: ModelSpec
    tensors: dict[str, LogicalTensor]

    def tensor(self, name: str) -> LogicalTensor:
        return self.tensors[name]


def make_weights() -> Weights:
    """Two layers, the second with a window, 4 bits in groups of 32, a tied 8-bit head."""
    spec = ModelSpec(
        model_type="llama",
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position=128,
        norm_eps=1e-5,
        rope=RopeSpec(theta=1e4, rotary_dim=16),
        tied_embeddings=True,
        sliding_windows=(None, 6),
    )
    rng = np.random.default_rng(0)
    tensors: dict[str, LogicalTensor] = {}
    for name, shape in spec.tensors().items():
        if name == spec.embedding_name:
            tensors[name] = quantize_head(rng.normal(size=shape).astype(np.float32))
        elif len(shape) == 1:
            tensors[name] = rng.uniform(0.5, 1.5, shape).astype(np.float32)
        else:
            out, columns = shape
            tensors[name] = QuantizedTensor(
                packed=rng.integers(0, 256, (out, columns // 2), np.uint8),
                scales=rng.uniform(0.01, 0.04, (out, columns // 32)).astype(np.float16),
                zeros=None,
                bits=4,
                group_size=32,
                in_features=columns,
            )
    return Weights(spec, tensors)


@pytest.fixture(scope="module")
def onnx_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_onnx(make_weights(), tmp_path_factory.mktemp("onnx"))[0]


@pytest.fixture(scope="module")
def shared(onnx_path: Path) -> Iterator[OrtExecutor]:
    with OrtExecutor.from_file(onnx_path, threads=1, accuracy_level=0) as executor:
        yield executor


@pytest.fixture
def executor(shared: OrtExecutor) -> OrtExecutor:
    """Float32 activations, and an empty cache of 24 pages of 4 tokens."""
    shared.allocate_kv(BLOCKS, PAGE, "f32")
    return shared


def int32(*values: Any) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def make_batch(chunks: list[tuple[int, list[int]]], rows: list[int] | None = None) -> Batch:
    """Sequences of (tokens before, new ids); sequence b has pages 6b to 6b + 5 in the first group, and the
    same backwards in the second."""
    tables = [[range(6 * b, 6 * b + 6) for b in range(len(chunks))]]
    tables.append([range(6 * b + 5, 6 * b - 1, -1) for b in range(len(chunks))])
    slots = [
        [
            table[b][p // PAGE] * PAGE + p % PAGE
            for b, (past, ids) in enumerate(chunks)
            for p in range(past, past + len(ids))
        ]
        for table in tables
    ]
    bounds = np.cumsum([0, *(len(ids) for _, ids in chunks)]).astype(np.int32)
    return Batch(
        token_ids=int32(*(token for _, ids in chunks for token in ids)),
        cu_seqlens=bounds,
        past_lens=int32(*(past for past, _ in chunks)),
        block_table=np.array([[list(pages) for pages in table] for table in tables], np.int32).reshape(
            2, len(chunks), 6
        ),
        slot_mapping=np.array(slots, np.int32).reshape(2, bounds[-1]),
        logit_rows=int32(*(range(bounds[-1]) if rows is None else rows)),
    )


IDS = np.random.default_rng(4).integers(0, VOCAB, 24).tolist()


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


def test_f16_pages_are_half_the_size_and_nearly_as_good(executor: OrtExecutor) -> None:
    expected, size = executor.step(make_batch([(0, IDS)])), executor.kv_layout.bytes_per_block
    executor.allocate_kv(BLOCKS, PAGE, "f16")
    assert executor.kv_layout.bytes_per_block == size // 2 == 2 * 2 * PAGE * 2 * 16 * 2
    found = executor.step(make_batch([(0, IDS)]))
    assert 0 < np.abs(found - expected).max() < 0.02 * np.abs(expected).max()
    assert executor.kv_layout.group_bytes == (size // 4,) * 2
    content = executor.read_blocks(int32(0, 1, 2))
    executor.write_blocks(int32(10, 11, 12), content)
    assert executor.read_blocks(int32(10, 11, 12)) == content


def test_blocks_read_copied_and_written_keep_a_sequence(executor: OrtExecutor) -> None:
    executor.step(make_batch([(0, IDS[:22])], rows=[]))
    last = make_batch([(22, IDS[22:])])
    expected = executor.step(last)
    moved = np.random.default_rng(1).permutation(np.arange(6, BLOCKS))[:6].astype(np.int32)
    there = replace(
        last,
        block_table=moved[last.block_table],
        slot_mapping=(moved[last.slot_mapping // PAGE] * PAGE + last.slot_mapping % PAGE).astype(np.int32),
    )
    pages = np.arange(6, dtype=np.int32)
    saved = read_all(executor, pages)
    assert sum(map(len, saved)) == 6 * executor.kv_layout.bytes_per_block

    for group in range(2):
        executor.copy_blocks(pages, moved, group)
    np.testing.assert_array_equal(executor.step(there), expected)
    assert read_all(executor, moved) == saved

    executor.allocate_kv(BLOCKS, PAGE, "f32")
    assert not any(map(any, read_all(executor, moved)))
    for group in range(2):
        executor.write_blocks(moved, saved[group], group)
    np.testing.assert_array_equal(executor.step(there), expected)


def test_pages_of_a_window_group_are_its_own(executor: OrtExecutor) -> None:
    executor.step(make_batch([(0, IDS)], rows=[]))
    pages, other = int32(0, 1), int32(7, 8)
    before = read_all(executor, int32(0, 1, 7, 8))
    saved = executor.read_blocks(pages, 1)
    executor.copy_blocks(pages, other, 1)
    assert executor.read_blocks(other, 1) == saved
    executor.write_blocks(int32(0), saved[: len(saved) // 2], 0)
    assert executor.read_blocks(int32(0, 1, 7, 8), 0)[len(saved) // 2 :] == before[0][len(saved) // 2 :]
    assert executor.read_blocks(pages, 1) == saved
    assert read_all(executor, int32(0, 1, 7, 8)) != before


def read_all(executor: OrtExecutor, pages: NDArray[np.int32]) -> list[bytes]:
    """What these pages hold in each group."""
    return [executor.read_blocks(pages, group) for group in range(len(executor.kv_layout.group_bytes))]


def test_pages_that_swap_are_all_read_first(executor: OrtExecutor) -> None:
    executor.step(make_batch([(0, IDS)], rows=[]))
    one, two = (executor.read_blocks(int32(i)) for i in (0, 1))
    executor.copy_blocks(int32(0, 1), int32(1, 0))
    assert executor.read_blocks(int32(0, 1)) == two + one
    assert one != two


GOOD = make_batch([(3, [5, 6]), (0, [7])])
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"token_ids": GOOD.token_ids.astype(np.int64)}, "token_ids is int64"),
    "not an array": ({"past_lens": [3, 0]}, "past_lens is list"),
    "dimensions": ({"block_table": GOOD.block_table[0]}, "block_table is int32"),
    "a group missing": ({"block_table": GOOD.block_table[:1]}, "block_table has shape"),
    "a slot missing": ({"slot_mapping": GOOD.slot_mapping[:, :2]}, "slot_mapping has shape"),
    "a bound missing": ({"cu_seqlens": int32(0, 3)}, "cu_seqlens has shape"),
    "falling bounds": ({"cu_seqlens": int32(0, 4, 3)}, "cu_seqlens goes"),
    "bounds that start late": ({"cu_seqlens": int32(1, 2, 3)}, "cu_seqlens goes from 1"),
    "bounds that end early": ({"cu_seqlens": int32(0, 1, 2)}, "cu_seqlens goes from 0 to 2; expected 0 to 3"),
    "an unknown token": (
        {"token_ids": int32(5, VOCAB, 7)},
        f"token_ids holds {VOCAB}; expected 0 to {VOCAB - 1}",
    ),
    "a token below zero": ({"token_ids": int32(5, -1, 7)}, "token_ids holds -1"),
    "a past below zero": ({"past_lens": int32(-1, 0)}, "past_lens holds -1"),
    "a past too long": (
        {"past_lens": int32(3, 24)},
        "block_table has room for 24 tokens; sequence 1 comes to 25",
    ),
    "a page too high": (
        {"block_table": np.where(GOOD.block_table == 1, BLOCKS, GOOD.block_table)},
        "block_table holds 24",
    ),
    "a page below -1": (
        {"block_table": np.where(GOOD.block_table == 1, -2, GOOD.block_table)},
        "block_table holds -2",
    ),
    "a slot too high": (
        {"slot_mapping": np.array([[1, 2, 96], [1, 2, 3]], np.int32)},
        "slot_mapping holds 96",
    ),
    "a slot below -1": (
        {"slot_mapping": np.array([[1, 2, -2], [1, 2, 3]], np.int32)},
        "slot_mapping holds -2",
    ),
    "a slot twice": ({"slot_mapping": np.array([[1, 2, 4], [1, 2, 1]], np.int32)}, "slot 1 of group 1 twice"),
    "a page of two sequences": (
        {"slot_mapping": np.array([[1, 2, 4], [8, 9, 10]], np.int32)},
        "page 2 of group 1 for sequences 0 and 1",
    ),
    "a row too high": ({"logit_rows": int32(3)}, "logit_rows holds 3"),
    "a row below zero": ({"logit_rows": int32(-1)}, "logit_rows holds -1"),
}


@pytest.mark.parametrize("case", BAD)
def test_arrays_that_break_the_contract_are_named_and_nothing_is_written(
    case: str, executor: OrtExecutor
) -> None:
    changes, message = BAD[case]
    before = read_all(executor, np.arange(BLOCKS, dtype=np.int32))
    with pytest.raises(ExecutorError, match=message):
        executor.step(replace(GOOD, **changes))
    assert read_all(executor, np.arange(BLOCKS, dtype=np.int32)) == before
    assert executor.step(GOOD).shape == (3, VOCAB)


@pytest.mark.parametrize(
    "call",
    [
        lambda e: e.copy_blocks(int32(0, BLOCKS), int32(1, 2)),
        lambda e: e.copy_blocks(int32(0), int32(1, 2)),
        lambda e: e.copy_blocks(int32(0, 1), int32(2, 2)),
        lambda e: e.read_blocks(int32(-1)),
        lambda e: e.read_blocks(np.array([0])),
        lambda e: e.write_blocks(int32(0), b"short"),
        lambda e: e.write_blocks(int32(0, 0), bytes(2 * e.kv_layout.group_bytes[0])),
        lambda e: e.copy_blocks(int32(0), int32(1), 2),
        lambda e: e.read_blocks(int32(0), -1),
        lambda e: e.write_blocks(int32(0), bytes(e.kv_layout.group_bytes[0]), "all"),
    ],
)
def test_pages_that_are_not_there_are_refused(
    call: Callable[[OrtExecutor], object], executor: OrtExecutor
) -> None:
    with pytest.raises(ExecutorError):
        call(executor)


def test_settings_out_of_range(executor: OrtExecutor, onnx_path: Path) -> None:
    with pytest.raises(SettingError, match=r"int8.*CpuExecutor"):
        executor.allocate_kv(BLOCKS, PAGE, "int8")
    with pytest.raises(SettingError, match="num_blocks"):
        executor.allocate_kv(0, PAGE, "f32")
    with pytest.raises(SettingError, match="threads"):
        OrtExecutor.from_file(onnx_path, threads=0)
    with pytest.raises(SettingError, match=r"providers has 'NoSuchProvider'.*CPUExecutionProvider"):
        OrtExecutor.from_file(onnx_path, providers=["NoSuchProvider"])


def test_cuda_comes_first_where_it_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    offered = ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(ort_session.ort, "get_available_providers", lambda: offered)
    cpu = ("CPUExecutionProvider", {})
    assert ort_session.choose_providers(None) == [("CUDAExecutionProvider", {}), cpu]
    assert ort_session.choose_providers(["CPUExecutionProvider"]) == [cpu]
    with_options = ("CUDAExecutionProvider", {"device_id": "1"})
    assert ort_session.choose_providers([with_options, "CUDAExecutionProvider"]) == [with_options, cpu]


def test_what_onnx_runtime_refuses_is_raised_and_does_not_run_on_the_cpu_instead(
    capfd: pytest.CaptureFixture[str],
) -> None:
    unsound: Any = [("CPUExecutionProvider", "no options")]
    with pytest.raises(ExecutorError, match=r"^ONNX Runtime refused the copy graph: 'providers'[^\n]*$"):
        ort_session.make_session(b"", providers=unsound, threads=1, what="the copy graph")
    assert capfd.readouterr() == ("", "")


def test_closed_twice_and_used_after(onnx_path: Path) -> None:
    executor = OrtExecutor.from_file(onnx_path, threads=1)
    with pytest.raises(ExecutorError, match="allocate_kv"):
        executor.step(GOOD)
    executor.allocate_kv(BLOCKS, PAGE, "f32")
    executor.close()
    executor.close()
    with pytest.raises(ExecutorError):
        executor.step(GOOD)
    with pytest.raises(ExecutorError, match="closed"):
        executor.allocate_kv(BLOCKS, PAGE, "f32")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match=r"decoder\.onnx"):
        OrtExecutor.from_file(tmp_path / "decoder.onnx")


def reload_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "nybble.runtime.ort_session")
    importlib.import_module("nybble.runtime.ort_session")


def test_two_onnx_runtimes_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.0")
    with pytest.raises(MissingDependencyError, match="onnxruntime and onnxruntime-gpu are both installed"):
        reload_session(monkeypatch)


def test_a_missing_onnx_runtime_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingDependencyError, match=r"nybble\[onnx\]"):
        reload_session(monkeypatch)


def test_an_old_onnx_runtime_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort_session.ort, "__version__", "1.27.3")
    with pytest.raises(MissingDependencyError, match=r"1\.28 or newer; 1\.27\.3 is installed"):
        reload_session(monkeypatch)
