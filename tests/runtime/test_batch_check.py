"""What the executors refuse alike: tokens of one step that would write over each other."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from decoders import load, quantized
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nybble.errors import ExecutorError
from nybble.runtime.batch import Batch
from nybble.runtime.batch_check import check_slots
from nybble.runtime.cpu_executor import CpuExecutor
from nybble.runtime.executor import Executor
from nybble.runtime.ort_executor import OrtExecutor

PAGE = 4


def batch_of(lengths: list[int], slots: list[list[int]]) -> Batch:
    tokens, sequences = sum(lengths), len(lengths)
    return Batch(
        token_ids=np.zeros(tokens, np.int32),
        cu_seqlens=np.cumsum([0, *lengths]).astype(np.int32),
        past_lens=np.zeros(sequences, np.int32),
        block_table=np.zeros((len(slots), sequences, 1), np.int32),
        slot_mapping=np.array(slots, np.int32).reshape(len(slots), tokens),
        logit_rows=np.zeros(0, np.int32),
    )


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[list[int]]]:
    lengths = draw(st.lists(st.integers(0, 5), max_size=5))
    count = sum(lengths)
    slot = st.one_of(st.just(-1), st.integers(0, 60))
    slots = draw(st.lists(st.lists(slot, min_size=count, max_size=count), min_size=1, max_size=2))
    return lengths, slots


def collide(lengths: list[int], slots: list[list[int]], page_size: int) -> bool:
    owners = [sequence for sequence, length in enumerate(lengths) for _ in range(length)]
    for group in slots:
        written = [(slot, owner) for slot, owner in zip(group, owners, strict=True) if slot >= 0]
        pages = {(slot // page_size, owner) for slot, owner in written}
        if len({slot for slot, _ in written}) < len(written) or len({page for page, _ in pages}) < len(pages):
            return True
    return False


@given(case=batches())
def test_a_slot_is_written_once_and_a_page_by_one_sequence(case: tuple[list[int], list[list[int]]]) -> None:
    lengths, slots = case
    if collide(lengths, slots, PAGE):
        with pytest.raises(ExecutorError, match="slot_mapping writes"):
            check_slots(batch_of(lengths, slots), PAGE)
    else:
        check_slots(batch_of(lengths, slots), PAGE)


BOUNDS = {"wraps": [0, 2**31 - 1, -5, 4], "falls": [0, 5, 4], "late": [1, 4], "short": [0, 3], "none": []}


@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)
def test_bounds_that_are_none_are_named(bounds: list[int]) -> None:
    batch = replace(batch_of([4], [[0, 1, 2, 3]]), cu_seqlens=np.array(bounds, np.int32))
    with pytest.raises(ExecutorError, match="cu_seqlens"):
        check_slots(batch, PAGE)


@pytest.fixture(scope="module", params=["cpu", "ort"])
def executor(request: pytest.FixtureRequest, make_tiny_model: Callable[..., Path]) -> Iterator[Executor]:
    weights = quantized(load(make_tiny_model("llama")), 4, 32, True, False)
    executor: Executor = (
        CpuExecutor(weights, threads=1)
        if request.param == "cpu"
        else OrtExecutor.from_weights(weights, threads=1)
    )
    executor.allocate_kv(8, 16, "f16")
    yield executor
    executor.close()


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([32, 32, 48], "slot_mapping writes slot 32 of group 0 twice"),
        ([32, 33, 40], "slot_mapping writes page 2 of group 0 for sequences 0 and 1"),
    ],
)
def test_both_executors_refuse_with_the_same_line(executor: Executor, slots: list[int], message: str) -> None:
    batch = batch_of([2, 1], [slots])
    batch = replace(batch, block_table=np.array([[[2], [3]]], np.int32))
    before = executor.read_blocks(np.arange(8, dtype=np.int32))
    with pytest.raises(ExecutorError) as caught:
        executor.step(batch)
    assert str(caught.value) == message
    assert executor.read_blocks(np.arange(8, dtype=np.int32)) == before
    executor.step(replace(batch, slot_mapping=np.array([[32, 33, 48]], np.int32)))


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=batches())
def test_both_executors_refuse_the_same_slots(
    executor: Executor, case: tuple[list[int], list[list[int]]]
) -> None:
    lengths, slots = case
    batch = batch_of(lengths, slots[:1])
    if collide(lengths, slots[:1], 16):
        with pytest.raises(ExecutorError, match="slot_mapping writes"):
            executor.step(batch)
    else:
        executor.step(batch)
