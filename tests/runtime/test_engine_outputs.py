"""What comes out of the engine: how answers end, their logprobs, seeds and timings, and the statistics."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from engines import PROMPT, answer, expected_tokens, run

from nybble.errors import RequestError
from nybble.runtime.sampling_params import ResolvedSampling, SamplingParams
from nybble.runtime.sequence import Request
from nybble.runtime.tokenizer import Tokenizer

Make = Callable[..., Any]


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


def test_the_statistics_say_what_was_done(make_engine: Make, make_executor: Make) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 0.001
        return now[0]

    executor, steps, ended = make_executor(), [], []
    executor.decode_steps = 0
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
    read = 6 * (executor.weight_bytes - executor.skipped_bytes) + page * sum(
        int(b.past_lens.sum()) + len(b.token_ids) for b in executor.steps
    )
    assert found.bandwidth_share == pytest.approx(read / found.executor_seconds / 1e6, rel=0.01)
