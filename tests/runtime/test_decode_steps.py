"""Several steps of decodes in one call of the executor: the tokens, pages and ends of a call a step."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from engines import PROMPT, answer, greedy, reference_without_end, run

from nybble.errors import DeadlineExceeded, ExecutorError
from nybble.runtime.batch import Batch
from nybble.runtime.engine_loop import EngineLoop
from nybble.runtime.sampling_params import SamplingParams
from nybble.runtime.sequence import Request
from nybble.runtime.sinks import Ended, ThreadSink
from nybble.runtime.speculation import NgramProposer, Speculator

Make = Callable[..., Any]


class TestEngine:
    def test_one_answer_takes_eight_steps_a_call_with_the_tokens_of_a_call_a_step(
        self, make_engine: Make, make_executor: Make
    ) -> None:
        executor = make_executor()
        engine = make_engine(executor, eos_token_ids=[])
        sequence = engine.add(Request("a", tuple(PROMPT), greedy(22)))
        run(engine)
        assert sequence.output_ids == reference_without_end(executor, PROMPT, 22)
        assert executor.runs == [8, 8, 5]  # the first token is the prompt's
        assert engine.pages_free == 64
        found = engine.statistics
        assert (found.steps, found.decode_tokens, found.mean_batch) == (22, 22, 1.0)
        assert found.time_between_tokens.p50 > 0

    @pytest.mark.parametrize("steps", [0, 1, 3])
    def test_an_executor_says_how_many_it_takes(
        self, make_engine: Make, make_executor: Make, steps: int
    ) -> None:
        executor = make_executor()
        executor.decode_steps = steps
        answer(make_engine(executor, eos_token_ids=[]), PROMPT, temperature=0.0, max_tokens=8)
        assert executor.runs == ([3, 3] if steps == 3 else [])

    @pytest.mark.parametrize(
        "params",
        [
            {"logprobs": 0},
            {"best_of": 2},
            {"regex": "[a-z]+"},
        ],
    )
    def test_what_needs_the_logits_takes_a_step_a_call(
        self, make_engine: Make, make_executor: Make, params: dict[str, Any]
    ) -> None:
        executor = make_executor()
        answer(make_engine(executor), PROMPT, **{"temperature": 0.0, "max_tokens": 9, **params})
        assert not executor.runs

    @pytest.mark.parametrize(
        "params",
        [
            {"temperature": 0.7},
            {"temperature": 3.0, "n": 3},
            {"temperature": 1.5, "top_k": 7, "top_p": 0.9, "min_p": 0.01, "min_tokens": 5},
            {"repetition_penalty": 1.2},
            {"temperature": 0.5, "presence_penalty": 1.0, "frequency_penalty": 0.5},
            {"logit_bias": {3: 1.0, 8: -100.0}},
        ],
    )
    def test_an_executor_chooses_by_rule_what_the_engine_would(
        self, make_engine: Make, make_executor: Make, params: dict[str, Any]
    ) -> None:
        found = []
        for steps in (0, 8):
            executor = make_executor()
            executor.decode_steps = steps
            engine = make_engine(executor)
            given = SamplingParams(**{"temperature": 0.0, "max_tokens": 30, "seed": 5, **params})
            sequence = engine.add(Request("a", tuple(PROMPT), given))
            other = engine.add(Request("b", tuple(PROMPT[3:]), greedy(25)))
            run(engine)
            found.append([sample.output_ids for sample in (*sequence.samples, other)])
            assert bool(executor.runs) == bool(steps)
            assert engine.pages_free == 64
        assert found[0] == found[1]
        assert len(set(map(tuple, found[0]))) == len(found[0])

    def test_a_rule_that_leaves_no_token_fails_its_request_alone(
        self, make_engine: Make, make_executor: Make
    ) -> None:
        executor = make_executor()
        # Every logit that is changed becomes infinite, the first time that one is over zero.
        engine = make_engine(executor, eos_token_ids=[])
        params = greedy(30, repetition_penalty=1e-45)
        a = engine.add(Request("a", tuple(PROMPT), params))
        b = engine.add(Request("b", tuple(PROMPT), greedy(9)))
        run(engine)
        assert "no token can be chosen at position" in str(a.error)
        assert b.output_ids == reference_without_end(executor, PROMPT, 9)
        assert engine.pages_free == 64

    def test_answers_side_by_side(self, make_engine: Make, make_executor: Make) -> None:
        executor = make_executor()
        engine = make_engine(executor, max_batch_tokens=64, eos_token_ids=[])
        prompts = [PROMPT, PROMPT[::-1], PROMPT[3:]]
        sequences = [
            engine.add(Request(str(i), tuple(prompt), greedy(count)))
            for i, (prompt, count) in enumerate(zip(prompts, (21, 6, 40), strict=True))
        ]
        run(engine)
        for sequence, prompt in zip(sequences, prompts, strict=True):
            count = len(sequence.output_ids)
            assert sequence.output_ids == reference_without_end(executor, prompt, count)
        assert [len(s.output_ids) for s in sequences] == [21, 6, 40]
        assert executor.runs == [5, 8, 7, 8, 8, 3]  # each goes as far as nobody is at an end
        assert engine.pages_free == 64

    def test_a_stop_token_ends_the_call(self, make_engine: Make, make_executor: Make) -> None:
        executor = make_executor()
        tokens = reference_without_end(executor, PROMPT, 30)
        stop = next(token for i, token in enumerate(tokens) if i > 2 and token not in tokens[:i])
        engine = make_engine(executor, eos_token_ids=[stop])
        sequence = answer(engine, PROMPT, temperature=0.0, max_tokens=30)
        assert sequence.output_ids == tokens[: tokens.index(stop) + 1]
        assert sum(executor.runs) == len(sequence.output_ids) - 1  # none was taken after it
        assert sequence.finish_reason == "stop"

    def test_after_a_stop_string_what_else_was_chosen_is_dropped(
        self, make_engine: Make, make_executor: Make
    ) -> None:
        executor = make_executor()
        plain = answer(make_engine(executor, eos_token_ids=[]), PROMPT, temperature=0.0, max_tokens=30)
        pieces = [piece.text for piece in plain.pieces]
        text = "".join(pieces)
        where = next(
            i for i in range(2, 29) if pieces[i].strip() and text.find(pieces[i]) == len("".join(pieces[:i]))
        )
        engine = make_engine(executor, eos_token_ids=[])
        sequence = answer(engine, PROMPT, temperature=0.0, max_tokens=30, stop=[pieces[where]])
        assert sequence.output_ids == plain.output_ids[: where + 1]
        assert sequence.output().outputs[0].text == "".join(pieces[:where])
        assert engine.pages_free == 64

    def test_who_waits_is_not_made_to_wait(self, make_engine: Make, make_executor: Make) -> None:
        executor = make_executor(num_blocks=8)
        engine = make_engine(executor, max_sequences=2, max_batch_tokens=64, eos_token_ids=[])
        a = engine.add(Request("a", tuple(PROMPT), greedy(10)))
        long = [*PROMPT[::-1], *PROMPT, *PROMPT[:6]]  # there are no pages for it before the other's end
        b = engine.add(Request("b", tuple(long), greedy(8)))
        run(engine)
        assert executor.runs == [7]  # of the second one
        assert a.output_ids == reference_without_end(executor, PROMPT, 10)
        assert b.output_ids == reference_without_end(executor, long, 8)

    def test_who_waits_for_a_place_waits_for_an_end_anyway(
        self, make_engine: Make, make_executor: Make
    ) -> None:
        executor = make_executor()
        engine = make_engine(executor, max_sequences=1, eos_token_ids=[])
        a = engine.add(Request("a", tuple(PROMPT), greedy(20)))
        b = engine.add(Request("b", tuple(PROMPT[2:]), greedy(12)))
        run(engine)
        assert executor.runs == [8, 8, 3, 8, 3]
        assert a.output_ids == reference_without_end(executor, PROMPT, 20)
        assert b.output_ids == reference_without_end(executor, PROMPT[2:], 12)

    def test_a_row_without_numbers_fails_its_request_alone(
        self, make_engine: Make, make_executor: Make
    ) -> None:
        executor = make_executor()
        whole = executor.step

        def step(batch: Batch) -> Any:
            logits = whole(batch)
            if len(executor.steps) == 5:
                logits[0] = np.nan
            return logits

        executor.step = step
        engine = make_engine(executor, eos_token_ids=[])
        a = engine.add(Request("a", tuple(PROMPT[:4]), greedy(9)))
        b = engine.add(Request("b", tuple(PROMPT[4:]), greedy(9)))
        run(engine)
        assert isinstance(a.error, ExecutorError)
        assert "position 8 is no number" in str(a.error)
        assert a.output_ids == reference_without_end(executor, PROMPT[:4], 4)
        assert b.output_ids == reference_without_end(executor, PROMPT[4:], 9)
        assert engine.pages_free == 64

    def test_an_error_of_any_step_is_the_calls(self, make_engine: Make, make_executor: Make) -> None:
        executor = make_executor()
        executor.fail_at[13] = RuntimeError("gone")
        sequence = answer(make_engine(executor, eos_token_ids=[]), PROMPT, temperature=0.0, max_tokens=30)
        assert "gone" in str(sequence.error)
        assert sequence.output_ids == reference_without_end(executor, PROMPT, 9)

    @pytest.mark.parametrize("error", [MemoryError(), KeyboardInterrupt()])
    def test_what_a_step_could_not_do_is_done_again(
        self, make_engine: Make, make_executor: Make, error: BaseException
    ) -> None:
        executor = make_executor()
        executor.fail_at[13] = error
        engine = make_engine(executor, eos_token_ids=[])
        sequence = engine.add(Request("a", tuple(PROMPT), greedy(30)))
        try:
            run(engine)
        except KeyboardInterrupt:
            run(engine)
        assert sequence.output_ids == reference_without_end(executor, PROMPT, 30)
        assert engine.pages_free == 64

    @pytest.mark.parametrize("given", [[], [[1], [2, 3]], [[1]] * 9])
    def test_an_executor_that_breaks_the_contract_fails_the_request(
        self, make_engine: Make, make_executor: Make, given: list[list[int]]
    ) -> None:
        executor = make_executor()
        executor.decode = lambda *arguments: given
        sequence = answer(make_engine(executor, eos_token_ids=[]), PROMPT, temperature=0.0, max_tokens=30)
        assert "expected 1 of 1 to 8 steps" in str(sequence.error)

    def test_several_answers_to_a_prompt(self, make_engine: Make, make_executor: Make) -> None:
        executor = make_executor()
        engine = make_engine(executor, eos_token_ids=[])
        sequence = answer(engine, PROMPT, temperature=0.0, max_tokens=20, n=3, min_tokens=5)
        expected = reference_without_end(executor, PROMPT, 20)
        assert [list(output.token_ids) for output in sequence.output().outputs] == [expected] * 3
        assert sum(executor.runs) > 8
        assert engine.pages_free == 64

    def test_a_deadline_is_looked_at_between_calls(self, make_engine: Make, make_executor: Make) -> None:
        executor = make_executor()
        engine = make_engine(executor, eos_token_ids=[], clock=lambda: float(len(executor.steps)))
        sequence = engine.add(Request("a", tuple(PROMPT), greedy(60), deadline=12.0))
        run(engine)
        assert isinstance(sequence.error, DeadlineExceeded)
        assert sequence.output_ids == reference_without_end(executor, PROMPT, 17)  # the call that began at 9
        assert engine.pages_free == 64

    def test_nobody_gives_pages_up_for_more_than_a_step(self, make_engine: Make, make_executor: Make) -> None:
        executor = make_executor(num_blocks=10)
        engine = make_engine(executor, max_model_len=40, eos_token_ids=[])
        # Nine and four tokens grow to 22 and 16: all ten pages at their ends, none to spare before.
        sequences = [engine.add(Request("a", tuple(PROMPT), greedy(13)))]
        sequences.append(engine.add(Request("b", tuple(PROMPT[:4]), greedy(12))))
        run(engine)
        assert sequences[0].output_ids == reference_without_end(executor, PROMPT, 13)
        assert sequences[1].output_ids == reference_without_end(executor, PROMPT[:4], 12)
        assert engine.statistics.preemptions == 0
        assert engine.pages_free == 10

    def test_an_answer_slides_where_it_would_a_step_a_call(
        self, make_engine: Make, make_executor: Make
    ) -> None:
        texts = []
        for steps in (0, 8):
            executor = make_executor(num_blocks=20)
            executor.decode_steps = steps
            engine = make_engine(executor, max_model_len=30, eos_token_ids=[])
            sequence = engine.add(Request("a", tuple(PROMPT), greedy(60), on_context_end="slide", n_keep=3))
            run(engine)
            texts.append(sequence.output_ids)
        assert texts[0] == texts[1]
        assert len(texts[0]) == 60

    def test_a_message_ends_the_call_after_its_step(self, make_engine: Make, make_executor: Make) -> None:
        executor = make_executor()
        engine = make_engine(executor, eos_token_ids=[])
        loop = EngineLoop(engine)
        whole, other = executor.step, ThreadSink(streaming=False)

        def step(batch: Batch) -> Any:
            if len(executor.steps) == 12:
                loop.submit([Request("b", tuple(PROMPT[2:]), greedy(3))], other)
            return whole(batch)

        executor.step = step
        sink = ThreadSink(streaming=False)
        # From another thread, as everything comes that the engine's does not ask for itself.
        step_allowed = pytest.MonkeyPatch()
        step_allowed.setattr(EngineLoop, "on_thread", property(lambda self: False))
        loop.submit([Request("a", tuple(PROMPT), greedy(40))], sink)
        end = sink.get()
        step_allowed.undo()
        assert isinstance(end, Ended)
        assert end.sequence.output_ids == reference_without_end(executor, PROMPT, 40)
        assert executor.runs[:2] == [8, 4]
        assert len(executor.steps[13].past_lens) == 2  # the other has begun
        loop.close()

    @pytest.mark.parametrize("kind", ["ngram", "failed"])
    def test_a_speculator_is_asked_as_often_as_it_looks(
        self, make_engine: Make, make_executor: Make, kind: str
    ) -> None:
        class Proposer(NgramProposer):
            looks = 0

            def chances(self, sequence: Any, limit: int) -> Any:
                self.looks += 1
                if kind == "failed":
                    raise ValueError("no guess")
                return ()

        executor, proposer = make_executor(num_blocks=100), Proposer()
        engine = make_engine(executor, speculator=Speculator(proposer), eos_token_ids=[], max_model_len=300)
        sequence = answer(engine, PROMPT, temperature=0.0, max_tokens=100)
        assert sequence.output_ids == reference_without_end(executor, PROMPT, 100)
        # After 32 steps without a guess, the prompt's among them, it looks in every fourth; after a failure
        # never.
        assert set(executor.runs[:-1]) == {8 if kind == "failed" else 4}
        looked = sum(step <= 32 or step % 4 == 0 for step in range(1, 100))
        assert proposer.looks == (1 if kind == "failed" else looked)
