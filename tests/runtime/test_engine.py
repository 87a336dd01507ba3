"""The engine over a small real decoder: tokens do not depend on what else runs, pages always come back."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from engines import PROMPT, answer, expected_tokens, reference_without_end, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nybble.errors import (
    DeadlineExceeded,
    DoesNotFitError,
    ExecutorError,
    QueueFull,
    RequestError,
    SettingError,
)
from nybble.kvcache import KvCache
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
    for name, value in vars(batch).items():
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


def check_pages(engine: Engine, live: list[Sequence], blocks: int) -> None:
    held = {page for sequence in live for page in sequence.blocks.tables[0]}
    assert len(held) == blocks - engine.pages_free
    engine.cache.check()


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
    engine = make_engine(executor, max_batch_tokens=6, eos_token_ids=[], target_token_ms=1e9)
    engine.add(Request("a", (3, 4), SamplingParams(max_tokens=30)))
    engine.step()
    engine.add(Request("b", tuple(PROMPT), SamplingParams(max_tokens=30)))
    engine.add(Request("c", (8, 9, 10, 11), SamplingParams(max_tokens=30)))
    for _ in range(4):
        engine.step()
    counts = [np.diff(batch.cu_seqlens).tolist() for batch in executor.steps]
    assert counts == [[2], [1, 5], [1, 4, 1], [1, 1, 3], [1, 1, 1]]


def test_a_request_that_can_never_fit_is_refused_with_the_numbers(
    make_engine: Make, make_executor: Make
) -> None:
    engine = make_engine(make_executor(4, 4), max_model_len=100)
    with pytest.raises(
        DoesNotFitError, match="29 tokens of KV cache, 8 pages; the cache has 16 tokens, 4 pages"
    ):
        engine.add(Request("a", tuple(PROMPT), SamplingParams(max_tokens=20)))
    assert not engine.has_work
    sequence = answer(engine, PROMPT, ignore_eos=True)
    assert sequence.num_output == 7  # without max_tokens it runs to what there is
    assert sequence.finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "params", "error", "message"),
    [
        ([], {}, RequestError, "the prompt is empty"),
        ([1] * 200, {}, RequestError, "200 tokens; the context holds 200, the answer included"),
        ([64], {}, RequestError, "token 64; the model has 64"),
        ([1], {"logprobs": 65}, SettingError, "logprobs is 65"),
        ([1], {"stop_token_ids": [2, 64]}, SettingError, "stop_token_ids holds 64; the model has 64"),
    ],
)
def test_requests_that_cannot_run_are_refused_when_added(
    make_engine: Make, prompt: list[int], params: dict[str, Any], error: type[Exception], message: str
) -> None:
    engine = make_engine()
    with pytest.raises(error, match=message):
        engine.add(Request("a", tuple(prompt), SamplingParams(**params)))
    assert not engine.has_work


def test_a_prompt_one_short_of_the_context_gets_one_token(make_engine: Make) -> None:
    sequence = answer(make_engine(), [1] * 199, max_tokens=5)
    assert sequence.num_output == 1
    assert sequence.finish_reason in ("length", "stop")


def test_an_executors_error_fails_its_step_and_no_more(make_engine: Make, make_executor: Make) -> None:
    executor = make_executor()
    engine = make_engine(executor)
    executor.fail_at = {2: RuntimeError("out of\nluck")}
    first = engine.add(Request("a", tuple(PROMPT), SamplingParams(max_tokens=9)))
    engine.step()
    engine.step()
    assert isinstance(first.error, ExecutorError)
    assert str(first.error) == "the executor failed in a step: RuntimeError: out of luck"
    assert engine.pages_free == 64
    second = answer(engine, PROMPT, max_tokens=9)
    assert list(second.output().token_ids) == expected_tokens(executor, PROMPT, 9)


def test_an_interrupt_leaves_an_engine_that_goes_on(make_engine: Make, make_executor: Make) -> None:
    executor = make_executor()
    engine = make_engine(executor)
    sequence = engine.add(Request("a", tuple(PROMPT), SamplingParams(max_tokens=20)))
    for number in (1, 4, 5):
        executor.fail_at[number] = KeyboardInterrupt()
    interrupts = 0
    while engine.has_work:
        try:
            engine.step()
        except KeyboardInterrupt:
            interrupts += 1
        check_pages(engine, [] if sequence.finished else [sequence], 64)
        assert 64 - engine.pages_free <= -(-len(sequence.tokens) // 4)  # an interrupted step's are used again
    assert interrupts == 3
    assert list(sequence.output().token_ids) == expected_tokens(executor, PROMPT, 20)


def test_logits_that_are_not_numbers_fail_their_request_only(make_engine: Make, make_executor: Make) -> None:
    executor = make_executor()
    whole = executor.step

    def step(batch: Any) -> Any:
        logits = whole(batch)
        if len(logits) == 2:
            logits[0] = np.nan
        return logits

    executor.step = step
    engine = make_engine(executor)
    a = engine.add(Request("a", tuple(PROMPT[:4]), SamplingParams(max_tokens=9)))
    b = engine.add(Request("b", tuple(PROMPT[4:]), SamplingParams(max_tokens=9)))
    run(engine)
    assert isinstance(a.error, ExecutorError)
    assert list(b.output().token_ids) == expected_tokens(executor, PROMPT[4:], 9)


def test_logits_of_a_wrong_shape_are_an_error(make_engine: Make, make_executor: Make) -> None:
    executor = make_executor()
    executor.step = lambda batch: np.zeros((1, 7), np.float32)
    sequence = answer(make_engine(executor), PROMPT)
    assert "shape (1, 7); expected (1, 64)" in str(sequence.error)


def test_abort_frees_the_pages_and_keeps_what_was_said(make_engine: Make) -> None:
    engine = make_engine()
    sequence = engine.add(Request("a", tuple(PROMPT), SamplingParams(ignore_eos=True)))
    for _ in range(4):
        engine.step()
    engine.abort("a")
    engine.abort("a")
    engine.abort("never seen")
    assert engine.pages_free == 64
    assert not engine.has_work
    assert sequence.output().finish_reason == "abort"
    assert len(sequence.output().token_ids) == 4


def test_an_abort_inside_a_step_takes_effect_at_its_end(make_engine: Make, make_executor: Make) -> None:
    executor = make_executor()
    whole, engine = executor.step, make_engine(executor)

    def step(batch: Any) -> Any:
        if len(executor.steps) == 2:
            engine.abort("a")
        return whole(batch)

    executor.step = step
    a = engine.add(Request("a", tuple(PROMPT[:4]), SamplingParams(ignore_eos=True)))
    b = engine.add(Request("b", tuple(PROMPT[4:]), SamplingParams(max_tokens=9)))
    run(engine)
    assert a.finish_reason == "abort"
    assert a.num_output == 3
    assert list(b.output().token_ids) == expected_tokens(executor, PROMPT[4:], 9)
    assert engine.pages_free == 64


class TestStopping:
    """How answers end. The free text of the decoder is known from a run without stops."""

    @pytest.fixture
    def free(self, make_engine: Make) -> Any:
        return answer(make_engine(), PROMPT, max_tokens=40, ignore_eos=True).output()

    def test_stop_token_ends_it_and_stays_out_of_the_text(
        self, make_engine: Make, free: Any, byte_tokenizer: Tokenizer
    ) -> None:
        token = free.token_ids[6]
        first = free.token_ids.index(token)
        output = answer(make_engine(), PROMPT, ignore_eos=True, stop_token_ids=[token]).output()
        assert output.token_ids == free.token_ids[: first + 1]
        assert output.text == byte_tokenizer.decode(free.token_ids[:first])
        assert (output.finish_reason, output.stop_reason) == ("stop", token)

    def test_the_first_token_may_be_the_end(self, make_engine: Make, free: Any) -> None:
        output = answer(make_engine(eos_token_ids=[free.token_ids[0]]), PROMPT).output()
        assert (output.token_ids, output.text) == (free.token_ids[:1], "")
        assert output.finish_reason == "stop"

    def test_every_end_token_of_the_model_counts(self, make_engine: Make, free: Any) -> None:
        token = free.token_ids[6]
        first = free.token_ids.index(token)
        output = answer(make_engine(eos_token_ids=[0, token]), PROMPT).output()
        assert output.token_ids == free.token_ids[: first + 1]
        assert (output.finish_reason, output.stop_reason) == ("stop", None)

    def test_min_tokens_keeps_stop_tokens_from_being_chosen(self, make_engine: Make, free: Any) -> None:
        token = free.token_ids[6]
        output = answer(make_engine(eos_token_ids=[token]), PROMPT, min_tokens=10, max_tokens=30).output()
        assert token not in output.token_ids[:10]
        assert len(output.token_ids) > 10 or output.token_ids[-1] == token

    def test_stop_string_across_tokens_is_cut_and_never_shown(self, make_engine: Make, free: Any) -> None:
        stop = free.text[5:8]
        assert len(stop) == 3
        engine = make_engine()
        params = SamplingParams(stop=["never", stop], ignore_eos=True, max_tokens=40)
        sequence = engine.add(Request("a", tuple(PROMPT), params))
        shown = ""
        while engine.has_work:
            engine.step()
            shown = "".join(piece.text for piece in sequence.pieces)
            assert free.text[: free.text.index(stop)].startswith(shown)
        output = sequence.output()
        assert shown == output.text == free.text[: free.text.index(stop)]
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)

    def test_a_stop_string_is_not_looked_for_before_min_tokens(self, make_engine: Make, free: Any) -> None:
        stop = free.text[2]
        output = answer(
            make_engine(), PROMPT, stop=stop, ignore_eos=True, min_tokens=20, max_tokens=40
        ).output()
        assert len(output.token_ids) >= 20
        assert output.text[: len(free.text[:15])] == free.text[:15]

    def test_pieces_make_the_text_and_carry_the_tokens(self, make_engine: Make) -> None:
        for params in ({"max_tokens": 37}, {"stop": "a"}, {"stop": ["zzz", "Q."]}, {"stop_token_ids": [8]}):
            sequence = answer(
                make_engine(), PROMPT, **{"max_tokens": 60, "temperature": 1.5, "seed": 3, **params}
            )
            pieces = sequence.pieces
            assert "".join(p.text for p in pieces) == sequence.output().text
            assert tuple(p.token_id for p in pieces) == sequence.output().token_ids
            assert [p.finish_reason for p in pieces][:-1] == [None] * (len(pieces) - 1)
            assert pieces[-1].finish_reason == sequence.finish_reason


def test_logprobs_are_those_of_the_whole_text(make_engine: Make, make_executor: Make) -> None:
    executor = make_executor()
    output = answer(
        make_engine(executor), PROMPT, max_tokens=12, logprobs=3, temperature=1.3, seed=5
    ).output()
    rows = executor.reference([*PROMPT, *output.token_ids]).astype(np.float64)[len(PROMPT) - 1 :]
    exact = rows - np.log(np.exp(rows).sum(-1, keepdims=True))
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids)
    for token, found, row in zip(output.token_ids, output.logprobs, exact, strict=False):
        assert token in found
        assert set(np.argsort(-row)[:3].tolist()) <= set(found)
        for i, entry in found.items():
            assert entry.logprob == pytest.approx(row[i], abs=1e-4)
            assert entry.rank == 1 + int((row > row[i]).sum())
    assert answer(make_engine(executor), PROMPT, max_tokens=2).output().logprobs is None


def test_a_score_is_the_log_probability_of_each_token(make_engine: Make, make_executor: Make) -> None:
    executor = make_executor()
    for budget in (2, 5, 100):
        engine = make_engine(executor, max_batch_tokens=budget)
        sequence = engine.add(Request("a", tuple(PROMPT), score=True))
        run(engine)
        rows = executor.reference(PROMPT).astype(np.float64)
        exact = rows - np.log(np.exp(rows).sum(-1, keepdims=True))
        expected = [exact[i, token] for i, token in enumerate(PROMPT[1:])]
        np.testing.assert_allclose(sequence.scores, expected, atol=1e-4)
        assert engine.pages_free == 64


def test_timings_add_up(make_engine: Make) -> None:
    timings = answer(make_engine(), PROMPT, max_tokens=10, ignore_eos=True).output().timings
    assert (timings.prompt_tokens, timings.output_tokens) == (9, 10)
    assert timings.time_to_first_token is not None
    assert 0 < timings.time_to_first_token < timings.total
    after = timings.total - timings.time_to_first_token
    assert timings.tokens_per_second == pytest.approx(9 / after)


def test_without_a_seed_requests_differ_and_with_one_they_agree(make_engine: Make) -> None:
    def sampled(**params: Any) -> tuple[int, ...]:
        output = answer(
            make_engine(), PROMPT, temperature=3.0, max_tokens=30, ignore_eos=True, **params
        ).output()
        return output.token_ids

    assert sampled(seed=1) == sampled(seed=1) != sampled(seed=2)
    assert sampled() != sampled()


def test_generation_config_gives_what_is_unset(make_engine: Make, make_executor: Make) -> None:
    executor = make_executor()
    config = {"do_sample": True, "temperature": 2.0, "top_k": 5}
    output = answer(make_engine(executor, generation_config=config), PROMPT, max_tokens=20, seed=4).output()
    expected = expected_tokens(executor, PROMPT, 20, ResolvedSampling(temperature=2.0, top_k=5), seed=4)
    assert list(output.token_ids) == expected


def test_a_request_past_its_deadline_fails_and_is_named_by_the_step(make_engine: Make) -> None:
    now = [0.0]
    engine = make_engine(clock=lambda: now[0], max_sequences=1, eos_token_ids=[])
    running = engine.add(Request("a", tuple(PROMPT), SamplingParams(max_tokens=50), deadline=3))
    waiting = engine.add(Request("b", tuple(PROMPT), SamplingParams(max_tokens=50), deadline=2))
    engine.step()
    now[0] = 2.5
    assert engine.step() == [waiting, running]
    assert isinstance(waiting.error, DeadlineExceeded)
    assert "while it was waiting" in str(waiting.error)
    now[0] = 3.0
    assert engine.step() == [running]
    assert "0.000 s ago while it was running" in str(running.error)
    assert not engine.has_work
    assert engine.pages_free == 64


def test_a_full_queue_refuses_a_request_and_keeps_nothing_of_it(make_engine: Make) -> None:
    engine = make_engine(max_waiting=2)
    for name in "ab":
        engine.add(Request(name, tuple(PROMPT)))
    with pytest.raises(QueueFull, match="2 requests are waiting; max_waiting is 2"):
        engine.add(Request("c", tuple(PROMPT)))
    assert engine.statistics.requests_added == 2
    engine.step()
    engine.add(Request("c", tuple(PROMPT)))


def test_the_statistics_say_what_was_done(make_engine: Make, make_executor: Make) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 0.001
        return now[0]

    executor, steps, ended = make_executor(), [], []
    whole = executor.step

    def step(batch: Any) -> Any:
        now[0] += 0.1
        return whole(batch)

    executor.step = step
    engine = make_engine(
        executor, clock=clock, eos_token_ids=[], on_step=steps.append, on_end=ended.append, bandwidth=1e6
    )
    one = engine.add(Request("a", tuple(PROMPT), SamplingParams(max_tokens=5)))
    two = engine.add(Request("b", tuple(reversed(PROMPT)), SamplingParams(max_tokens=50)))
    engine.step()
    early = engine.statistics
    assert (early.waiting, early.running, early.pages, early.pages_used) == (0, 2, 64, 5)
    assert early.wasted_tokens == 20 - 16
    for _ in range(5):
        engine.step()
    engine.abort("b")
    with pytest.raises(RequestError):
        engine.add(Request("c", ()))
    found = engine.statistics
    assert (found.requests_added, found.requests_finished, found.requests_aborted) == (2, 1, 1)
    assert (found.requests_failed, found.running, found.pages_used) == (0, 0, 0)
    assert found.prefill_tokens == 18
    assert found.decode_tokens == 5 + two.num_output
    assert found.steps == len(steps) == len(executor.steps) == 6
    assert found.mean_batch == pytest.approx(sum(len(b.past_lens) for b in executor.steps) / 6)
    assert ended == [one, two]
    assert found.last_step == steps[-1]
    assert found.executor_seconds == pytest.approx(6 * 0.1, rel=0.05)
    assert found.tokens_per_second == pytest.approx(found.decode_tokens / found.busy_seconds)
    assert found.time_to_first_token.count == 2
    assert found.time_to_first_token.p50 == pytest.approx(0.1, rel=0.1)
    assert found.time_between_tokens.count == found.decode_tokens - 2
    assert found.time_between_tokens.p99 == pytest.approx(0.1, rel=0.1)
    assert found.latency.count == 1
    page = executor.kv_layout.bytes_per_block / 4
    read = 6 * executor.weight_bytes + page * sum(
        int(b.past_lens.sum()) + len(b.token_ids) for b in executor.steps
    )
    assert found.bandwidth_share == pytest.approx(read / found.executor_seconds / 1e6, rel=0.01)
