"""The model of a step's time, and the budget that follows from it, against machines whose cost is known."""

import random
from collections.abc import Callable

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from nybble.runtime.step_time import StepShape, StepTimeModel, token_pairs
from nybble.runtime.token_budget import CALM, DEFAULT_RATIO, TokenBudget

COSTS = st.tuples(
    st.floats(1e-3, 0.05),  # a step
    st.floats(0, 5e-3),  # a decode
    st.floats(0, 1e-6),  # a token of its context
    st.floats(1e-4, 1e-2),  # a token of a prompt
    st.floats(0, 1e-6),  # a pair
)


def machine(costs: tuple[float, ...]) -> Callable[[StepShape], float]:
    fixed, decode, context, token, pair = costs

    def seconds(shape: StepShape) -> float:
        decodes = fixed + decode * shape.decodes + context * shape.decode_context if shape.decodes else 0.0
        return decodes + token * shape.prefill_tokens + pair * shape.prefill_pairs

    return seconds


def shapes(generator: random.Random, count: int) -> list[StepShape]:
    made = []
    for _ in range(count):
        decodes, prefill = generator.randint(0, 16), generator.choice([0, 0, generator.randint(1, 500)])
        if decodes or prefill:
            context = decodes * generator.randint(1, 4000)
            past = generator.randint(0, 4000)
            pairs = token_pairs(prefill, past)
            made.append(StepShape(decodes, context, prefill, pairs, int(prefill > 0)))
    return made


def random_costs(generator: random.Random) -> tuple[float, ...]:
    """Of a machine as in `COSTS` on which a prompt's token costs a fifth to a 200th of a step: where it is
    less, what is left of a mixed step is mostly the decodes' error, and not all are learned."""
    fixed = 1e-3 * 50 ** generator.random()
    token = fixed / (5 * 40 ** generator.random())
    return fixed, generator.uniform(0, 5e-3), generator.uniform(0, 1e-6), token, generator.uniform(0, 1e-6)


def is_learned(seed: int, most_noise: float) -> bool:
    generator = random.Random(seed)
    costs, noise = random_costs(generator), generator.uniform(0, most_noise)
    seconds = machine(costs)
    model = StepTimeModel()
    for shape in shapes(generator, 300):
        model.observe(shape, seconds(shape) * generator.uniform(1 - noise, 1 + noise))
        if generator.random() < 0.2:
            model.prefill_seconds(1, 0)
    within = 0.05 + 1.5 * noise
    for decodes, past in ((2, 500), (8, 1000), (16, 3000)):
        alone = seconds(StepShape(decodes, decodes * past))
        if model.decode_seconds(decodes, decodes * past) != pytest.approx(alone, rel=within):
            return False
    for count, past in ((50, 300), (200, 2000)):
        added = seconds(StepShape(0, 0, count, token_pairs(count, past)))
        # What is left of a mixed step carries the decodes' error and noise too.
        of_decodes = 0.02 * seconds(StepShape(8, 8 * 1000)) + noise * 0.2
        if model.prefill_seconds(count, past) != pytest.approx(added, rel=within, abs=of_decodes):
            return False
    return True


# Of 2,000 machines 14 were not learned. Seeds and not Hypothesis, whose examples also depend on what else was
# imported: the same machines each time.
@pytest.mark.parametrize("most_noise", [0.0, 0.2])
def test_the_time_of_a_step_is_learned(most_noise: float) -> None:
    assert [seed for seed in range(100) if not is_learned(seed, most_noise)][3:] == []


@settings(max_examples=40)
@given(
    costs=COSTS, seed=st.integers(0, 1000), decodes=st.integers(1, 16), past=st.integers(0, 3000),
    ratio=st.floats(1.2, 10),
)  # fmt: skip
def test_a_shared_step_stays_within_its_target(
    costs: tuple[float, ...], seed: int, decodes: int, past: int, ratio: float
) -> None:
    assume(costs[3] >= costs[0] / 200)  # as in `random_costs`: not all others are learned
    generator, seconds = random.Random(seed), machine(costs)
    context = decodes * 500
    alone = seconds(StepShape(decodes, context))
    budget = TokenBudget(512, target_seconds=ratio * alone, min_chunk=1)
    for shape in shapes(generator, 400):
        budget.observe(shape, seconds(shape))
        if generator.random() < 0.2:
            budget.start(2, 10)
            budget.room(0)
    budget.start(decodes, context)
    count = budget.room(past)
    assert 1 <= count <= 512 - decodes
    taken = seconds(StepShape(decodes, context, count, token_pairs(count, past)))
    more = seconds(StepShape(decodes, context, count + 1, token_pairs(count + 1, past)))
    assert count == 1 or taken <= 1.1 * ratio * alone
    assert count == 512 - decodes or more >= 0.9 * ratio * alone
    budget.take(count, past)
    # What the target leaves is little; prompts after the first get no least share.
    assert budget.room(0) <= max(0, 512 - decodes - count)


def test_a_hiccup_changes_little() -> None:
    model = StepTimeModel()
    for number in range(200):
        shape = StepShape(8, 8 * (500 + number))
        model.observe(shape, 3.0 if number == 150 else 0.02)
    assert model.decode_seconds(8, 8 * 700) < 0.025


def test_a_machine_that_slows_down_is_noticed() -> None:
    model = StepTimeModel()
    for number in range(400):
        model.observe(StepShape(8, 4000), 0.02 if number < 200 else 0.1)
        model.decode_seconds(8, 4000)
    assert model.decode_seconds(8, 4000) == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize("slower", [0.5, 1.5, 3.0])
def test_a_machine_that_changes_while_prompts_are_computed_does_not_change_their_share(slower: float) -> None:
    budget = TokenBudget(512)
    seconds = machine((0.02, 5e-3, 0.0, 1e-3, 0.0))
    for _ in range(100):
        budget.observe(StepShape(8, 8000), seconds(StepShape(8, 8000)))
    taken = []
    for step in range(400):
        budget.start(8, 8000)
        count = budget.room(0)
        taken.append(count)
        shape = StepShape(8, 8000, count, 0, 1)
        hiccup = 2.0 if step % 17 == 0 else 1.0
        budget.observe(shape, seconds(shape) * (slower if step >= 100 else 1.0) * hiccup)
    assert 70 <= taken[99] <= 110  # one and a half times 60 ms, in steps of 1 ms
    assert 60 <= min(taken[101:]) <= max(taken[101:]) <= 130


def test_alone_prompts_have_the_whole_budget() -> None:
    budget = TokenBudget(512, target_seconds=1e-9)
    budget.observe(StepShape(0, 0, 512, token_pairs(512, 0), 1), 5.0)
    budget.start(0, 0)
    assert budget.room(0) == 512
    budget.take(100, 0)
    assert budget.room(0) == 412


def test_a_prompt_advances_whatever_the_target() -> None:
    budget = TokenBudget(512, target_seconds=1e-9, min_chunk=16)
    budget.observe(StepShape(4, 100), 0.01)
    budget.observe(StepShape(4, 100, 32, token_pairs(32, 0), 1), 0.5)
    budget.start(4, 100)
    assert budget.room(0) == 16
    budget.take(16, 0)
    assert budget.room(0) == 0


def test_without_a_target_a_shared_step_takes_a_multiple_of_one_alone() -> None:
    budget = TokenBudget(512)
    for _ in range(100):
        budget.observe(StepShape(4, 400), 0.01)
    for _ in range(50):
        budget.observe(StepShape(4, 400, 20, 0, 1), 0.01 + 20 * 1e-4)
    budget.start(4, 400)
    assert budget.room(0) == pytest.approx((DEFAULT_RATIO - 1) * 0.01 / 1e-4, rel=0.05)
    budget.start(4, 400, prompts=4)
    assert budget.room(0) == pytest.approx((DEFAULT_RATIO - 1) * 0.01 / 1e-4, rel=0.05)
    budget.start(4, 400, prompts=8)
    assert budget.room(0) == pytest.approx(2 * (DEFAULT_RATIO - 1) * 0.01 / 1e-4, rel=0.05)


def test_without_memory_steps_are_halved_and_grow_again() -> None:
    budget = TokenBudget(64)
    budget.shrink(64)
    budget.start(0, 0)
    assert budget.room(0) == 32
    budget.shrink(1)
    budget.start(0, 0)
    assert budget.room(0) == 1
    for expected in (2, 4, 8, 16, 32, 64, 64):
        for _ in range(CALM):
            budget.observe(StepShape(prefill_tokens=1, prefill_pairs=1), 0.1)
        budget.start(0, 0)
        assert budget.room(0) == expected
