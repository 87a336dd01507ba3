"""Several answers to a prompt, and prompts that share their beginning."""

from collections.abc import Callable
from typing import Any

import pytest
from engines import PROMPT, answer, reference_without_end, run, sampled

from nybble.errors import (
    ExecutorError,
)
from nybble.runtime.sampler import log_softmax
from nybble.runtime.sampling_params import SamplingParams
from nybble.runtime.sequence import Request, Sequence

Make = Callable[..., Any]


@pytest.mark.parametrize(
    ("params", "wanted"),
    [
        ({}, [True] * 4),
        ({"n": 2}, [True] * 4),
        ({"temperature": 0.5}, [False] * 4),
        ({"repetition_penalty": 1.2}, [False] * 4),
        ({"presence_penalty": 0.1}, [False] * 4),
        ({"logit_bias": {3: 1.0}}, [False] * 4),
        ({"logprobs": 0}, [False] * 4),
        ({"n": 1, "best_of": 2}, [False] * 4),
        ({"regex": "[a-z]+"}, [False] * 4),
        ({"min_tokens": 2}, [False, False, True, True]),
    ],
)
def test_greedy_answers_ask_for_the_highest_logit_alone(
    params: dict[str, Any], wanted: list[bool], make_engine: Make, make_executor: Make
) -> None:
    executor = make_executor()
    answer(make_engine(executor), PROMPT, **{"temperature": 0.0, "max_tokens": 4, **params})
    assert [batch.best_only for batch in executor.steps] == wanted[: len(executor.steps)]
    assert len(executor.steps) > 1


def test_a_step_with_one_that_asks_for_all_logits_computes_them(
    make_engine: Make, make_executor: Make
) -> None:
    executor = make_executor()
    engine = make_engine(executor, eos_token_ids=[])
    engine.add(Request("greedy", tuple(PROMPT), SamplingParams(temperature=0.0, max_tokens=6)))
    params = SamplingParams(temperature=1.0, max_tokens=3, seed=5)
    drawn = engine.add(Request("drawn", tuple(PROMPT[:5]), params))
    run(engine)
    assert drawn.output_ids == sampled(executor, PROMPT[:5], 3, 1.0, 5, 0)
    assert {batch.best_only for batch in executor.steps if len(batch.past_lens) == 2} == {False}
    assert executor.steps[-1].best_only


class TestSeveralAnswers:
    """`n` and `best_of`: answers that begin in the same pages."""

    @pytest.mark.parametrize("max_sequences", [1, 2, 8])
    def test_each_has_random_numbers_of_its_own_and_what_it_would_have_alone(
        self, make_engine: Make, make_executor: Make, max_sequences: int
    ) -> None:
        executor = make_executor()
        engine = make_engine(executor, max_sequences=max_sequences)
        sequence = answer(engine, PROMPT, n=4, temperature=4.0, seed=5, max_tokens=20)
        outputs = sequence.output().outputs
        assert [output.index for output in outputs] == [0, 1, 2, 3]
        for index, output in enumerate(outputs):
            assert list(output.token_ids) == sampled(executor, PROMPT, 20, 4.0, 5, index)
        assert len({output.token_ids for output in outputs}) == 4
        assert engine.pages_free == 64

    def test_the_prompt_is_computed_once_and_its_pages_are_shared(
        self, make_engine: Make, make_executor: Make
    ) -> None:
        executor = make_executor()
        executor.decode_steps = 0  # each step is looked at
        engine = make_engine(executor, max_batch_tokens=100, eos_token_ids=[])
        sequence = engine.add(Request("a", tuple(PROMPT), SamplingParams(n=5, temperature=1.0, max_tokens=4)))
        assert engine.step() == [sequence]
        assert [len(batch.token_ids) for batch in executor.steps] == [9]
        assert len(sequence.samples) == 5
        assert 64 - engine.pages_free == 3
        assert engine.statistics.pages_shared == 3
        assert engine.step() == [sequence]
        assert len(executor.steps[1].token_ids) == 5
        assert 64 - engine.pages_free == 2 + 5  # the third page is written by each
        run(engine)
        assert sequence.finished

    def test_what_the_first_answer_says_is_nothing_to_the_others(self, make_engine: Make) -> None:
        settings: list[dict[str, Any]] = [
            {"frequency_penalty": 2.0}, {"presence_penalty": 2.0}, {"repetition_penalty": 5.0},
        ]  # fmt: skip
        for penalty in settings:
            alone = answer(make_engine(), PROMPT, temperature=0.0, max_tokens=12, **penalty).output()
            together = answer(make_engine(), PROMPT, n=3, temperature=0.0, max_tokens=12, **penalty).output()
            assert [each.token_ids for each in together.outputs] == [alone.token_ids] * 3

    def test_best_of_gives_the_most_likely_first(self, make_engine: Make, make_executor: Make) -> None:
        executor = make_executor()
        sequence = answer(
            make_engine(executor), PROMPT, n=2, best_of=6, temperature=4.0, seed=3, max_tokens=10, logprobs=0
        )
        assert len(sequence.samples) == 6
        totals = {}
        for index in range(6):
            tokens = sampled(executor, PROMPT, 10, 4.0, 3, index)
            rows = log_softmax(executor.reference(PROMPT + tokens)[len(PROMPT) - 1 : -1])
            totals[tuple(tokens)] = sum(row[token] for row, token in zip(rows, tokens, strict=True))
        best = sorted(totals, key=lambda tokens: -totals[tokens])[:2]
        assert [output.token_ids for output in sequence.output().outputs] == best

    def test_pieces_say_which_answer_they_are_of(self, make_engine: Make) -> None:
        sequence = answer(make_engine(), PROMPT, n=3, temperature=1.5, seed=5, max_tokens=12)
        for index, output in enumerate(sequence.output().outputs):
            pieces = [piece for piece in sequence.pieces if piece.index == index]
            assert "".join(piece.text for piece in pieces) == output.text
            assert tuple(piece.token_id for piece in pieces) == output.token_ids
            assert pieces[-1].finish_reason == output.finish_reason

    def test_an_error_fails_all_and_an_abort_ends_all(self, make_engine: Make, make_executor: Make) -> None:
        executor = make_executor()
        engine = make_engine(executor, eos_token_ids=[])
        executor.fail_at = {3: RuntimeError("x")}
        failed = engine.add(Request("a", tuple(PROMPT), SamplingParams(n=3, max_tokens=30)))
        run(engine)
        assert all(isinstance(sample.error, ExecutorError) for sample in failed.samples)
        aborted = engine.add(Request("b", tuple(PROMPT), SamplingParams(n=3, max_tokens=30)))
        engine.step()
        engine.step()
        engine.abort("b")
        assert [output.finish_reason for output in aborted.output().outputs] == ["abort"] * 3
        assert engine.pages_free == 64
        assert not engine.has_work

    def test_an_error_in_another_answer_leaves_nothing_of_the_first(
        self, make_engine: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = make_engine()

        def fork(sequence: Sequence, other: Sequence) -> None:
            raise RuntimeError("x")

        monkeypatch.setattr(engine._scheduler, "fork", fork)
        sequence = answer(engine, PROMPT, n=2, max_tokens=1)
        assert isinstance(sequence.error, ExecutorError)
        assert sequence.finish_reason is not None  # it had ended before
        assert engine.statistics.running == 0
        assert engine.pages_free == 64


class TestPrefixes:
    def test_what_was_computed_before_is_not_computed_again(
        self, make_engine: Make, make_executor: Make
    ) -> None:
        executor = make_executor()
        engine = make_engine(executor, eos_token_ids=[])
        first = answer(engine, PROMPT, max_tokens=20)
        chat = [*first.tokens, 9, 8, 7]
        before = sum(len(batch.token_ids) for batch in executor.steps)
        second = answer(engine, chat, max_tokens=5)
        # All full pages of the first turn, the answer's among them, and of the next page what is the same.
        assert second.hit_tokens == second.output().timings.cached_tokens == 28
        assert sum(len(batch.token_ids) for batch in executor.steps) - before == len(chat) - 28 + 4
        assert list(second.output().token_ids) == reference_without_end(executor, chat, 5)
        assert engine.statistics.hit_rate == 28 / (len(PROMPT) + len(chat))

    def test_a_score_takes_nothing_over_and_survives_a_preemption(
        self, make_engine: Make, make_executor: Make
    ) -> None:
        executor = make_executor(10, 4)
        engine = make_engine(executor, max_model_len=40, eos_token_ids=[], max_batch_tokens=6)
        engine.add(Request("a", tuple(PROMPT), SamplingParams(max_tokens=25)))
        engine.step()
        text = [*PROMPT, *PROMPT, 11]
        scored = engine.add(Request("b", tuple(text), score=True))
        for _ in range(3):
            engine.step()
        assert scored.scores
        engine._scheduler._preempt()
        run(engine)
        rows = log_softmax(executor.reference(text))
        expected = [row[token] for row, token in zip(rows, text[1:], strict=False)]
        assert scored.preemptions
        assert scored.scores == pytest.approx(expected)
