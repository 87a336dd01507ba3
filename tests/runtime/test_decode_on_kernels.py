"""Several steps of decodes in one call of the kernels, in every instruction set: as a call a step."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoders import MIXED, Pages, Weights, load, quantized, some_ids
from engines import greedy, run
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import small_executor
from step_by_step import StepByStep
from token_rules import RuleInPython

from nybble._kernels import supported_kernels
from nybble.runtime.batch import Batch
from nybble.runtime.cpu_executor import DECODE_STEPS, CpuExecutor
from nybble.runtime.engine import DECODE_SECONDS, Engine
from nybble.runtime.sampler import Changes, TokenRule
from nybble.runtime.sampling_params import MAX_SEED, ResolvedSampling, SamplingParams
from nybble.runtime.sequence import Request
from nybble.runtime.tokenizer import Tokenizer

LENGTHS = [5, 37, 63, 250]  # tokens of each sequence's prompt: the ends of a page and of a segment are near
ROOM = 300


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
