"""Several steps of decodes in one call of the executor: the tokens, pages and ends of a call a step."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoders import MIXED, Pages, Weights, load, quantized, some_ids
from engines import PROMPT, answer, reference_without_end, run
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import small_executor
from step_by_step import StepByStep
from token_rules import RuleInPython

from nybble._kernels import supported_kernels
from nybble.errors import DeadlineExceeded, ExecutorError
from nybble.runtime.batch import Batch
from nybble.runtime.cpu_executor import DECODE_STEPS, CpuExecutor
from nybble.runtime.engine import DECODE_SECONDS, Engine
from nybble.runtime.engine_loop import EngineLoop
from nybble.runtime.sampler import Changes, TokenRule
from nybble.runtime.sampling_params import MAX_SEED, ResolvedSampling, SamplingParams
from nybble.runtime.sequence import Request
from nybble.runtime.sinks import Ended, ThreadSink
from nybble.runtime.speculation import NgramProposer, Speculator
from nybble.runtime.tokenizer import Tokenizer

Make = Callable[..., Any]
LENGTHS = [5, 37, 63, 250]  # tokens of each sequence's prompt: the ends of a page and of a segment are near
ROOM = 300


def greedy(max_tokens: int = 30, **others: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **others)


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


@pytest.fixture(scope="module")
def weights(make_tiny_model: Callable[..., Path]) -> Weights:
    """Two window groups, grouped heads, biases."""
    path = make_tiny_model("qwen2", use_sliding_window=True, tie_word_embeddings=True, **MIXED)
    return quantized(load(path), 4, 64, False, False)


@pytest.fixture(scope="module")
def pages(weights: Weights) -> Pages:
    return Pages(weights.spec, len(LENGTHS), ROOM)


@pytest.fixture(scope="module", params=supported_kernels())
def executor(weights: Weights, pages: Pages, request: pytest.FixtureRequest) -> Iterator[CpuExecutor]:
    """With the prompts in its cache."""
    patch = pytest.MonkeyPatch()
    patch.setenv("NYBBLE_ISA", request.param)
    executor = CpuExecutor(weights, threads=2)
    patch.undo()
    executor.allocate_kv(pages.num_blocks, pages.page_size, "int8")
    for sequence, length in enumerate(LENGTHS):
        executor.step(pages.batch([(sequence, 0, some_ids(weights.spec.vocab_size, length))]))
    yield executor
    executor.close()


def first_batch(pages: Pages, sequences: list[int], tokens: list[int], past: list[int]) -> Batch:
    chunks = [(s, p, [t]) for s, p, t in zip(sequences, past, tokens, strict=True)]
    batch = pages.batch(chunks)
    # Pages of the tokens to come are mapped as well.
    table = batch.block_table.copy()
    for row, (sequence, begin) in enumerate(zip(sequences, past, strict=True)):
        first = begin // pages.page_size
        table[:, row, first:] = pages.table[:, sequence, first:]
    return Batch(
        batch.token_ids, batch.cu_seqlens, batch.past_lens, table, batch.slot_mapping,
        np.arange(len(sequences), dtype=np.int32), best_only=True,
    )  # fmt: skip


class TestEngineOnKernels:
    def test_penalties_and_biases_over_several_calls(self, byte_tokenizer: Tokenizer) -> None:
        plain = self.answers(byte_tokenizer, 0, [greedy(30)])[0]
        asked = [
            greedy(30, repetition_penalty=1.3),
            greedy(30, presence_penalty=0.5, frequency_penalty=0.2, logit_bias={plain[3]: -100.0}),
            SamplingParams(max_tokens=30, temperature=2.0, top_p=0.9, repetition_penalty=1.1, seed=3, n=2),
            greedy(30),
        ]
        found = self.answers(byte_tokenizer, 8, asked)
        assert found == self.answers(byte_tokenizer, 0, asked)
        assert found[-1] == plain
        assert plain[3] not in found[1]
        assert len(set(map(tuple, found))) == len(found) == 5

    def test_extreme_settings_are_their_own_requests_affair(self, byte_tokenizer: Tokenizer) -> None:
        plain = self.answers(byte_tokenizer, 0, [greedy(30)])[0]
        asked = [
            greedy(30, top_k=1 << 80),
            greedy(30, repetition_penalty=1e-46),
            greedy(30, repetition_penalty=1e300),
            SamplingParams(max_tokens=30, temperature=1e-320, top_p=1e-320, top_k=1 << 31, min_p=1.0),
            greedy(30),
        ]
        found = self.answers(byte_tokenizer, 8, asked)
        assert found == self.answers(byte_tokenizer, 0, asked)
        assert found[0] == found[3] == found[4] == plain

    def answers(self, tokenizer: Tokenizer, steps: int, asked: list[SamplingParams]) -> list[list[int]]:
        """Of requests side by side, on kernels that take so many steps a call."""
        executor: Any = small_executor()
        given = executor if steps else StepByStep(executor)
        engine = Engine(given, tokenizer, max_model_len=100)
        sequences = [
            engine.add(Request(str(i), tuple(range(3, 12)), params)) for i, params in enumerate(asked)
        ]
        run(engine)
        executor.close()
        return [sample.output_ids for sequence in sequences for sample in sequence.samples]


VOCAB = 512  # of the tiny models


@st.composite
def token_rules(draw: st.DrawFn) -> TokenRule:
    def tokens() -> Any:
        found = draw(st.lists(st.integers(0, VOCAB - 1), max_size=40, unique=True))
        return np.array(found, np.int32)

    sampling = ResolvedSampling(
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 1e3])),
        top_k=draw(st.sampled_from([0, 1, 20, 1000])),
        top_p=draw(st.sampled_from([1.0, 0.9, 0.3])),
        min_p=draw(st.sampled_from([0.0, 0.2])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.1, 0.7])),
        presence_penalty=draw(st.sampled_from([0.0, 1.5])),
        frequency_penalty=draw(st.sampled_from([0.0, -0.7])),
    )
    counted, biased = tokens(), tokens()
    times = draw(st.lists(st.integers(1, 9), min_size=len(counted), max_size=len(counted)))
    values = draw(st.lists(st.floats(-100, 100, width=32), min_size=len(biased), max_size=len(biased)))
    return TokenRule(
        sampling,
        seed=draw(st.integers(0, MAX_SEED)),
        index=draw(st.integers(0, 5)),
        position=draw(st.integers(0, 1 << 20)),
        seen=draw(st.sampled_from([None, tokens()])),
        changes=draw(
            st.sampled_from(
                [
                    None,
                    Changes((biased, np.array(values, np.float32))),
                    Changes(None, (counted, np.array(times, np.float32))),
                    Changes((biased, np.array(values, np.float32)), (counted, np.array(times, np.float32))),
                ]
            )
        ),
    )


class TestCpuExecutor:
    @given(
        rules=st.lists(token_rules(), min_size=1, max_size=len(LENGTHS)),
        steps=st.integers(1, DECODE_STEPS),
        token=st.integers(0, 90),
    )
    @settings(max_examples=150, deadline=None)
    def test_rules_choose_what_the_sampler_chooses_from_each_row(
        self, executor: CpuExecutor, pages: Pages, rules: list[TokenRule], steps: int, token: int
    ) -> None:
        sequences = list(range(len(rules)))
        first, past = [token + s for s in sequences], LENGTHS[: len(rules)]
        choices = [RuleInPython(rule) for rule in rules]
        expected: list[list[int]] = []
        for i in range(steps):
            batch = first_batch(pages, sequences, expected[-1] if i else first, [p + i for p in past])
            rows = executor.step(replace(batch, best_only=False))
            expected.append([choice.next(row) for choice, row in zip(choices, rows, strict=True)])
        batch = replace(first_batch(pages, sequences, first, past), best_only=False)
        assert executor.decode(batch, steps, [], 60.0, rules) == expected
        end = expected[steps // 2][0]
        until = next(i for i, row in enumerate(expected) if end in row) + 1
        assert executor.decode(batch, steps, [end], 60.0, rules) == expected[:until]

    @given(
        sequences=st.permutations(range(len(LENGTHS))).flatmap(
            lambda order: st.integers(1, len(LENGTHS)).map(lambda n: list(order[:n]))
        ),
        steps=st.integers(1, DECODE_STEPS),
        token=st.integers(0, 90),
        end=st.booleans(),
    )
    @settings(max_examples=40, deadline=None)
    def test_the_tokens_are_those_of_a_call_a_step(
        self, executor: CpuExecutor, pages: Pages, sequences: list[int], steps: int, token: int, end: bool
    ) -> None:
        count = len(sequences)
        tokens = [token + s for s in range(count)]
        past = [LENGTHS[s] for s in sequences]
        expected: list[list[int]] = []
        given_tokens = tokens
        for i in range(steps):
            batch = first_batch(pages, sequences, given_tokens, [p + i for p in past])
            given_tokens = executor.step(batch).argmax(axis=1).tolist()
            expected.append(given_tokens)
        ends = [expected[steps // 2][-1], -5, 1 << 40] if end else []
        if end:
            expected = expected[: next(i for i, row in enumerate(expected) if ends[0] in row) + 1]
        found = executor.decode(first_batch(pages, sequences, tokens, past), steps, ends, 60.0)
        assert found == expected
        # What it wrote is what the steps write, too.
        again = first_batch(pages, sequences, expected[-1], [p + len(expected) for p in past])
        after = executor.step(again).copy()
        for i, row in enumerate([tokens, *expected[:-1]]):
            executor.step(first_batch(pages, sequences, row, [p + i for p in past]))
        assert np.array_equal(after, executor.step(again))

    def test_time_and_hurry_end_it_after_a_step(self, executor: CpuExecutor, pages: Pages) -> None:
        batch = first_batch(pages, [1, 0], [3, 4], [LENGTHS[1], LENGTHS[0]])
        whole = executor.decode(batch, 8, [], 60.0)
        assert len(whole) == 8
        assert executor.decode(batch, 8, [], 0.0) == whole[:1]
        executor.hurry(True)
        assert executor.decode(batch, 8, [], 60.0) == whole[:1]
        executor.hurry(False)
        assert executor.decode(batch, 8, [], 60.0) == whole
        assert DECODE_SECONDS > 0

    def test_a_row_without_numbers_ends_it(self, weights: Weights) -> None:
        tensors = dict(weights.tensors)
        name = weights.spec.final_norm_name
        norm = np.array(tensors[name])
        norm[3] = np.nan
        broken = CpuExecutor(Weights(weights.spec, {**tensors, name: norm}), threads=2)
        pages = Pages(weights.spec, 2, 40)
        broken.allocate_kv(pages.num_blocks, pages.page_size, "f16")
        assert broken.decode(first_batch(pages, [0, 1], [3, 4], [0, 0]), 8, [], 60.0) == [[-1, -1]]
        one = first_batch(pages, [0], [3], [0])
        assert broken.decode(one, 8, [], 60.0) == [[-1]]
        rule = TokenRule(ResolvedSampling(1.0), 1, 0, 1)
        assert broken.decode(replace(one, best_only=False), 8, [], 60.0, [rule]) == [[-1]]
        broken.close()

    def test_what_it_did_without_is_that_of_all_steps(self, weights: Weights) -> None:
        pages = Pages(weights.spec, 1, 40)
        skipped = []
        for steps in (1, 8):
            executor = CpuExecutor(weights, threads=1)
            executor.allocate_kv(pages.num_blocks, pages.page_size, "f16")
            tokens, done = [3], 0
            for past in range(0, 8, steps):
                tokens = executor.decode(first_batch(pages, [0], tokens, [past]), steps, [], 60.0)[-1]
                done += executor.skipped_bytes
            skipped.append(done)
            executor.close()
        assert skipped[0] == skipped[1] > 0
