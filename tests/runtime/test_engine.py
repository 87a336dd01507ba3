"""The engine over a small real decoder: tokens do not depend on what else runs, pages always come back."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from engines import PROMPT, answer, check_pages, expected_tokens, reference_without_end
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nybble.kvcache import KvCache
from nybble.runtime.batch_check import DIMENSIONS
from nybble.runtime.engine import Engine, build_batch
from nybble.runtime.sampling_params import ResolvedSampling, SamplingParams
from nybble.runtime.scheduler import Chunk
from nybble.runtime.sequence import Request, Sequence
from nybble.runtime.tokenizer import Tokenizer

Make = Callable[..., Any]


def test_a_batch_is_arrays_that_kernels_read(byte_tokenizer: Tokenizer) -> None:
    cache = KvCache(9, 4, (None, 16))
    cache.pools[1].allocate(1)
    chunks = []
    for number, (computed, length) in enumerate(((0, 5), (9, 10), (2, 9))):
        request = Request(str(number), tuple(range(length)))
        sequence = Sequence(request, byte_tokenizer, cache.sequence(), max_tokens=1, stop_ids=frozenset())
        sequence.blocks.append(length)
        sequence.computed = computed
        chunks.append(Chunk(sequence, 3 if computed == 2 else length - computed))
    batch = build_batch(chunks)
    for name in DIMENSIONS:
        value = getattr(batch, name)
        assert value.dtype == np.int32, name
        assert value.flags.c_contiguous, name
    assert batch.token_ids.tolist() == [0, 1, 2, 3, 4, 9, 2, 3, 4]
    assert batch.cu_seqlens.tolist() == [0, 5, 6, 9]
    assert batch.past_lens.tolist() == [0, 9, 2]
    assert batch.logit_rows.tolist() == [4, 5]  # the last chunk leaves tokens for later
    assert batch.block_table.shape == (2, 3, 3)
    assert batch.block_table[0].tolist() == [[0, 1, -1], [2, 3, 4], [5, 6, 7]]
    assert batch.block_table[1].tolist() == [[1, 2, -1], [3, 4, 5], [6, 7, 8]]
    slots = [0, 1, 2, 3, 4, 4 * 4 + 1, 5 * 4 + 2, 5 * 4 + 3, 6 * 4]
    assert batch.slot_mapping.tolist() == [slots, [slot + 4 for slot in slots]]


@pytest.mark.parametrize("windows", [(None, None), (None, 5), (3, None, 6)])
def test_greedy_tokens_equal_a_loop_without_a_cache(
    make_engine: Make, make_executor: Make, windows: tuple[int | None, ...]
) -> None:
    executor = make_executor(windows=windows)
    sequence = answer(make_engine(executor), PROMPT, max_tokens=40)
    assert list(sequence.output().token_ids) == expected_tokens(executor, PROMPT, 40)
    assert sequence.num_output > 5


@pytest.mark.parametrize("budget", [1, 3, 8, 100])
def test_the_chunk_size_changes_no_token(make_engine: Make, make_executor: Make, budget: int) -> None:
    executor = make_executor()
    sequence = answer(make_engine(executor, max_batch_tokens=budget), PROMPT, max_tokens=20)
    assert list(sequence.output().token_ids) == expected_tokens(executor, PROMPT, 20)
    assert max(len(batch.token_ids) for batch in executor.steps) <= budget


REQUEST = st.tuples(
    st.lists(st.integers(1, 63), min_size=1, max_size=25),
    st.integers(1, 25),  # max_tokens
    st.sampled_from([0.0, 0.8, 2.0]),  # temperature
    st.sampled_from([1.0, 1.5]),  # repetition_penalty
    st.integers(0, 30),  # the step before which it comes
    st.sampled_from([None, None, None, 3]),  # steps after which it is aborted
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    requests=st.lists(REQUEST, min_size=1, max_size=7),
    blocks=st.integers(13, 40),
    budget=st.integers(1, 40),
    max_sequences=st.integers(1, 8),
    fault=st.sampled_from([None, None, 5]),
)
def test_any_traffic_gives_each_request_its_own_tokens_and_all_pages_back(
    make_executor: Make,
    byte_tokenizer: Tokenizer,
    requests: list[Any],
    blocks: int,
    budget: int,
    max_sequences: int,
    fault: int | None,
) -> None:
    executor = make_executor(blocks, 4)
    if fault is not None:
        executor.fail_at = {fault: RuntimeError("injected")}
    engine = Engine(
        executor,
        byte_tokenizer,
        max_model_len=50,
        max_batch_tokens=budget,
        max_sequences=max_sequences,
        eos_token_ids=[0],
    )
    sequences: dict[int, Sequence] = {}
    for step in range(2_000):
        for i, (prompt, max_tokens, temperature, penalty, arrival, _) in enumerate(requests):
            if arrival == step:
                params = SamplingParams(
                    temperature=temperature, repetition_penalty=penalty, seed=i, max_tokens=max_tokens
                )
                sequences[i] = engine.add(Request(str(i), tuple(prompt), params))
        for i, (*_, arrival, abort) in enumerate(requests):
            if abort is not None and step == arrival + abort:
                engine.abort(str(i))
        engine.step()
        check_pages(engine, [s for s in sequences.values() if not s.finished], blocks)
        if step > 30 and not engine.has_work:
            break
    assert not engine.has_work
    assert engine.pages_free == blocks
    for i, (prompt, max_tokens, temperature, penalty, _, abort) in enumerate(requests):
        sampling = ResolvedSampling(temperature=temperature, repetition_penalty=penalty)
        expected = expected_tokens(executor, prompt, max_tokens, sampling, seed=i)
        got = list(sequences[i].output().token_ids)
        if sequences[i].error is not None or sequences[i].finish_reason == "abort":
            assert fault is not None or abort is not None
            assert got == expected[: len(got)]
        else:
            assert got == expected


def test_pages_grow_with_the_sequence(make_engine: Make, make_executor: Make) -> None:
    engine = make_engine(make_executor(64, 4), eos_token_ids=[])
    sequence = engine.add(Request("a", tuple(PROMPT), SamplingParams(max_tokens=30)))
    used = []
    while engine.has_work:
        engine.step()
        used.append((64 - engine.pages_free, sequence.computed))
    assert used[0] == (3, 9)
    assert all(pages == -(-computed // 4) for pages, computed in used[:-1])
    assert used[-1][0] == 0


def test_running_out_of_pages_preempts_the_youngest_and_changes_nothing(
    make_engine: Make, make_executor: Make
) -> None:
    executor = make_executor(10, 4)
    engine = make_engine(executor, max_model_len=40, eos_token_ids=[])
    prompts = [PROMPT[i:] + PROMPT[:i] for i in range(3)]
    sequences = [
        engine.add(Request(str(i), tuple(p), SamplingParams(max_tokens=25))) for i, p in enumerate(prompts)
    ]
    order = []
    while engine.has_work:
        order += [s.request.id for s in engine.step() if s.finished]
    for sequence, prompt in zip(sequences, prompts, strict=True):
        assert list(sequence.output().token_ids) == reference_without_end(executor, prompt, 25)
    assert order == ["0", "1", "2"]
    prefilled = sum(len(batch.token_ids) for batch in executor.steps)
    assert prefilled > 3 * (9 + 24)  # something was computed twice


def test_a_preempted_request_comes_before_later_ones(make_engine: Make, make_executor: Make) -> None:
    engine = make_engine(make_executor(10, 4), max_model_len=40, eos_token_ids=[], max_sequences=3)
    for i in range(5):
        engine.add(Request(str(i), tuple(PROMPT), SamplingParams(max_tokens=25)))
    order = []
    while engine.has_work:
        order += [s.request.id for s in engine.step() if s.finished]
    assert order == ["0", "1", "2", "3", "4"]


def test_a_prompt_waits_until_there_are_pages_for_all_of_it(make_engine: Make, make_executor: Make) -> None:
    engine = make_engine(make_executor(10, 4), max_model_len=40, max_batch_tokens=12)
    older = engine.add(Request("a", (7,) * 32, SamplingParams(max_tokens=1)))
    younger = engine.add(Request("b", (8,) * 10, SamplingParams(max_tokens=1)))
    pages = []
    while engine.has_work:
        engine.step()
        pages.append((older.computed, younger.computed))
    assert pages == [(12, 0), (24, 0), (32, 0), (32, 10)]


def test_decodes_come_first_and_prompts_fill_the_budget(make_engine: Make, make_executor: Make) -> None:
    executor = make_executor()
    executor.decode_steps = 0
    engine = make_engine(executor, max_batch_tokens=6, eos_token_ids=[], target_token_ms=1e9)
    engine.add(Request("a", (3, 4), SamplingParams(max_tokens=30)))
    engine.step()
    engine.add(Request("b", tuple(PROMPT), SamplingParams(max_tokens=30)))
    engine.add(Request("c", (8, 9, 10, 11), SamplingParams(max_tokens=30)))
    for _ in range(4):
        engine.step()
    counts = [np.diff(batch.cu_seqlens).tolist() for batch in executor.steps]
    assert counts == [[2], [1, 5], [1, 4, 1], [1, 1, 3], [1, 1, 1]]
