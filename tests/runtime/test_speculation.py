"""Speculation changes no token: whatever is asked for, whoever guesses, greedy or sampled."""

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from decoders import Weights, load, quantized
from eager import Eager
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from nybble.runtime.engine import Engine
from nybble.runtime.sampling_params import SamplingParams
from nybble.runtime.sequence import Request
from nybble.runtime.speculation import DraftModelProposer, NgramProposer, Proposer, Speculator
from nybble.runtime.tokenizer import Tokenizer

cpu = pytest.importorskip("nybble.runtime.cpu_executor")
kernels = pytest.importorskip("nybble._kernels")

Make = Callable[..., Any]


class Wrong:
    """Guesses what is nearly always wrong, and sometimes right by chance."""

    def chances(self, answer: Any, limit: int) -> Sequence[float]:
        return [0.5] * min(limit, 4)

    def draft(self, answers: Sequence[Any], counts: Sequence[int]) -> list[list[int]]:
        return [[(a.position * 7 + i) % 50 for i in range(n)] for a, n in zip(answers, counts, strict=True)]

    def observe(self, answer: Any, proposed: int, accepted: int) -> None: ...

    def seconds(self, length: int) -> float:
        return 0.0

    def forget(self, answer: Any) -> None: ...

    def close(self) -> None: ...


class Counting:
    """Another proposer, whose right and wrong guesses are counted."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer
        self.proposed = self.accepted = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._proposer, name)

    def observe(self, answer: Any, proposed: int, accepted: int) -> None:
        self.proposed, self.accepted = self.proposed + proposed, self.accepted + accepted
        self._proposer.observe(answer, proposed, accepted)


def engine_of(executor: Any, tokenizer: Tokenizer, speculator: Speculator | None, **options: Any) -> Engine:
    return Engine(
        executor,
        tokenizer,
        **{"max_model_len": 90, "eos_token_ids": [0], "speculator": speculator, **options},
    )


def outputs(engine: Engine, requests: Sequence[tuple[list[int], SamplingParams]]) -> list[Any]:
    sequences = [engine.add(Request(str(i), tuple(p), params)) for i, (p, params) in enumerate(requests)]
    pieces: list[Any] = [[] for _ in sequences]
    for _ in range(5_000):
        if not engine.has_work:
            break
        engine.step()
    assert not engine.has_work
    for sequence, theirs in zip(sequences, pieces, strict=True):
        assert sequence.error is None, sequence.error
        theirs += sequence.pieces
    found = []
    for sequence, theirs in zip(sequences, pieces, strict=True):
        answers = sequence.output().outputs
        for output in answers:
            own = [piece for piece in theirs if piece.index == output.index]
            assert "".join(piece.text for piece in own) == output.text
            assert tuple(piece.token_id for piece in own) == output.token_ids
        found.append(answers)
    return found


# Few words, so that answers repeat themselves and their prompts.
PROMPT = st.lists(st.sampled_from([5, 9, 33, 12]), min_size=1, max_size=30)
PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.0, 0.7, 1.5]),
        "seed": st.integers(0, 5),
        "max_tokens": st.integers(1, 30),
        "min_tokens": st.sampled_from([0, 0, 7]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.3]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, 0.6]),
        "presence_penalty": st.sampled_from([0.0, 0.4]),
        "logit_bias": st.sampled_from([None, {0: 3.0, 7: 2.0}]),
        "stop": st.sampled_from([None, "e", ["ab", "ll", "gg"]]),
        "stop_token_ids": st.sampled_from([(), (14,)]),
        "ignore_eos": st.booleans(),
        "logprobs": st.sampled_from([None, 2]),
        "n": st.sampled_from([1, 1, 1, 2]),
        "regex": st.sampled_from([None, None, r"([a-z]{2,4} ?){2,9}", r"(ab|ba|c){1,12}d?", "[A-Za-z]*"]),
    }
).map(lambda given: {**given, "min_tokens": min(given["min_tokens"], given["max_tokens"])})
REQUESTS = st.lists(st.tuples(PROMPT, PARAMS), min_size=1, max_size=4)


def proposers(make_executor: Make) -> dict[str, Callable[[], Proposer]]:
    def draft(seed: int) -> Callable[[], Proposer]:
        return lambda: DraftModelProposer(make_executor(40, 4, seed=seed), vocab_size=64, max_tokens=16)

    return {"ngram": NgramProposer, "same": draft(1), "other": draft(2), "wrong": Wrong}


@pytest.mark.parametrize("kind", ["ngram", "same", "other", "wrong"])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests=REQUESTS, blocks=st.sampled_from([24, 60]), budget=st.sampled_from([5, 40]))
def test_answers_are_the_same_with_and_without(
    make_executor: Make, byte_tokenizer: Tokenizer, kind: str, requests: Any, blocks: int, budget: int
) -> None:
    asked = [(prompt, SamplingParams(**params)) for prompt, params in requests]
    plain = [
        outputs(engine_of(make_executor(seed=1), byte_tokenizer, None), [request])[0] for request in asked
    ]
    speculator = Eager(proposers(make_executor)[kind]())
    executor = make_executor(blocks, 4, seed=1)
    engine = engine_of(executor, byte_tokenizer, speculator, max_batch_tokens=budget)
    assert outputs(engine, asked) == plain
    assert engine.pages_free == blocks
    proposer = speculator._proposer
    assert speculator.failure is None
    assert not getattr(proposer, "_states", {})
    if isinstance(proposer, DraftModelProposer):
        assert proposer.cache.pages_available == 40


def test_a_draft_that_is_the_target_is_always_right(make_executor: Make, byte_tokenizer: Tokenizer) -> None:
    for temperature, penalty in ((0.0, 0.0), (1.2, 0.5)):
        draft = make_executor(64, 4, seed=1)
        counting = Counting(DraftModelProposer(draft, vocab_size=64))
        target = make_executor(64, 4, seed=1)
        engine = engine_of(target, byte_tokenizer, Eager(counting), eos_token_ids=[])
        params = SamplingParams(temperature=temperature, frequency_penalty=penalty, seed=3, max_tokens=60)
        outputs(engine, [([5, 9, 33], params), ([7, 7], params)])
        assert counting.proposed - 2 <= counting.accepted > 80
        assert len(target.steps) < 10
        # One batch for all answers' guesses.
        assert max(len(batch.past_lens) for batch in draft.steps) == 2


def test_a_draft_that_knows_nothing_is_switched_off(make_executor: Make, byte_tokenizer: Tokenizer) -> None:
    draft = make_executor(100, 4, seed=2)
    ticks = itertools.count()

    def clock() -> float:
        return next(ticks) * 1e-4

    class Ticking(Speculator):
        """Sees steps to which a token more adds a third."""

        def observe_step(self, answers: int, more: int, seconds: float, steps: int = 1) -> None:
            super().observe_step(answers, more, 3e-4 + more * 1e-4 + self._spent, steps)

    counting = Counting(DraftModelProposer(draft, vocab_size=64, clock=clock))
    speculator = Ticking(counting, clock=clock)
    target = make_executor(100, 4, seed=1)
    engine = engine_of(target, byte_tokenizer, speculator, max_model_len=400)
    params = SamplingParams(temperature=1.5, seed=3, max_tokens=300, ignore_eos=True)
    outputs(engine, [([5, 9, 33], params)])
    assert counting.proposed < 40  # of 300 tokens; by luck some are right
    first = counting.proposed
    # The next one begins with what was learned.
    outputs(engine, [([5, 9, 12], params)])
    assert counting.proposed - first < 20
    assert first < 60


def test_a_draft_that_fails_ends_the_guessing_and_nothing_else(
    make_executor: Make, byte_tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    draft = make_executor(64, 4, seed=1)
    draft.fail_at = {4: RuntimeError("injected")}
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=30)
    plain = outputs(engine_of(make_executor(seed=1), byte_tokenizer, None), [([5, 9], params)])
    proposer = DraftModelProposer(draft, vocab_size=64)
    engine = engine_of(make_executor(seed=1), byte_tokenizer, Eager(proposer))
    assert outputs(engine, [([5, 9], params)]) == plain
    assert "speculation failed, and is off from now on: injected" in caplog.text
    assert draft.closed
    assert outputs(engine, [([5, 9], params)]) == plain


def test_a_draft_without_room_guesses_what_it_can(make_executor: Make, byte_tokenizer: Tokenizer) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    asked = [([5, 9, 33] * 5, params), ([7, 8] * 6, params)]
    plain = [outputs(engine_of(make_executor(seed=1), byte_tokenizer, None), [each])[0] for each in asked]
    counting = Counting(DraftModelProposer(make_executor(9, 4, seed=1), vocab_size=64))
    engine = engine_of(make_executor(seed=1), byte_tokenizer, Eager(counting))
    assert outputs(engine, asked) == plain
    assert counting.accepted > 5


def test_a_draft_of_another_width_is_used_as_far_as_it_goes(
    make_executor: Make, byte_tokenizer: Tokenizer
) -> None:
    params = SamplingParams(max_tokens=20, temperature=0.9, seed=2, logit_bias={63: 1.0})
    plain = outputs(engine_of(make_executor(seed=1), byte_tokenizer, None), [([5, 9], params)])
    for width in (60, 80):
        proposer = DraftModelProposer(make_executor(seed=1, vocab_size=width), vocab_size=64)
        engine = engine_of(make_executor(seed=1), byte_tokenizer, Eager(proposer))
        assert outputs(engine, [([5, 9], params)]) == plain


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 500), temperature=st.sampled_from([0.0, 1.0]))
def test_a_grammar_keeps_its_form_and_forbidden_guesses_are_not_run(
    make_executor: Make, byte_tokenizer: Tokenizer, seed: int, temperature: float
) -> None:
    pytest.importorskip("llguidance")
    pattern = r"(ab|ba|c){1,12}d"
    params = SamplingParams(regex=pattern, seed=seed, temperature=temperature, max_tokens=40)
    counting = Counting(Wrong())
    engine = engine_of(make_executor(seed=seed), byte_tokenizer, Eager(counting))
    ((answer,),) = outputs(engine, [([5, 9], params)])
    assume(answer.finish_reason == "stop")
    assert re.fullmatch(pattern, answer.text)
    assert counting.proposed - counting.accepted <= len(answer.token_ids)


@pytest.fixture(scope="module")
def weights(make_tiny_model: Callable[..., Path]) -> Weights:
    return quantized(load(make_tiny_model("llama")), 4, 64, False, False)


@pytest.fixture(scope="module")
def tiny_tokenizer(tiny_tokenizer_dir: Path) -> Tokenizer:
    return Tokenizer.from_folder(tiny_tokenizer_dir)


@pytest.fixture(scope="module")
def executors(weights: Weights) -> Iterator[list[Any]]:
    """A target, and a draft of the same weights."""
    made = [cpu.CpuExecutor(weights, threads=2) for _ in range(2)]
    for executor in made:
        executor.allocate_kv(64, 16, "f16")
    yield made
    for executor in made:
        executor.close()


@pytest.mark.parametrize("kind", ["ngram", "draft", "wrong"])
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests=REQUESTS)
def test_our_kernels_give_the_same_answers(
    executors: list[Any], tiny_tokenizer: Tokenizer, kind: str, requests: Any
) -> None:
    target, draft = executors
    if any(params["regex"] for _, params in requests):
        pytest.importorskip("llguidance")
    asked = [(prompt, SamplingParams(**params)) for prompt, params in requests]

    def run(speculator: Speculator | None, some: Any) -> list[Any]:
        eos = [tiny_tokenizer.eos_token_id or 0]
        return outputs(engine_of(target, tiny_tokenizer, speculator, eos_token_ids=eos), some)

    plain = [run(None, [request])[0] for request in asked]
    made: dict[str, Callable[[], Proposer]] = {
        "ngram": NgramProposer,
        "draft": lambda: DraftModelProposer(draft, vocab_size=target.spec.vocab_size),
        "wrong": Wrong,
    }
    counting = Counting(made[kind]())
    assert run(Eager(counting), asked) == plain
    # The same bits, so the same choices, up to the token that ends an answer.
    if kind == "draft" and not any(params.stop for _, params in asked):
        assert counting.proposed - counting.accepted <= sum(params.n for _, params in asked)
    # And as it decides for itself.
    assert run(Speculator(made[kind]()), asked) == plain
