"""As much is guessed as pays: by the chances there are, and by what steps with more tokens take."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from eager import Eager
from hypothesis import given, settings
from hypothesis import strategies as st

from nybble.runtime.speculation import NgramProposer, Speculator
from nybble.runtime.speculation.acceptance import Acceptance
from nybble.runtime.speculation.speculator import PROBE_AFTER
from nybble.runtime.speculation.step_costs import StepCosts


class Answer:
    """The part of an answer that proposers look at."""

    def __init__(self, tokens: Sequence[int] = (1,)) -> None:
        self.tokens = list(tokens)
        self.chooser = None

    @property
    def position(self) -> int:
        return len(self.tokens)


class Sure:
    """Guesses zeros, of which each is right with the same probability given those before."""

    def __init__(self, *shares: float, seconds: float = 0.0) -> None:
        self.shares, self.round = shares, seconds
        self.answers: list[Any] = []
        self.forgotten: list[Any] = []

    def chances(self, answer: Any, limit: int) -> Sequence[float]:
        self.answers.append(answer)
        share = self.shares[(len(self.answers) - 1) % len(self.shares)]
        return [share**n for n in range(1, limit + 1)] if share else []

    def draft(self, answers: Sequence[Any], counts: Sequence[int]) -> list[list[int]]:
        return [[0] * count for count in counts]

    def observe(self, answer: Any, proposed: int, accepted: int) -> None: ...

    def seconds(self, length: int) -> float:
        return self.round * length

    def forget(self, answer: Any) -> None:
        self.forgotten.append(answer)

    def close(self) -> None: ...


def lengths(speculator: Speculator, count: int = 1, limit: int = 20, room: int = 100) -> list[int]:
    drafts = speculator.propose([Answer() for _ in range(count)], [limit] * count, room)
    return [len(draft) for draft in drafts]


def taught(proposer: Any, costs: Sequence[float], answers: int = 1) -> Speculator:
    """A speculator that saw steps with 0, 1, ... more tokens take so many milliseconds, often."""
    speculator = Speculator(proposer)
    for _ in range(40):
        for more, milliseconds in reversed(list(enumerate(costs))):
            speculator.observe_step(answers, more, milliseconds * 1e-3)
    return speculator


FLAT = [3.0] * 16
STEEP = [3.0 * (1 + n) for n in range(16)]
BLOCKS = [3.0 if n < 4 else 5.0 if n < 8 else 12.0 for n in range(16)]


def test_what_is_free_is_guessed_and_what_costs_as_much_as_it_gives_is_not() -> None:
    assert lengths(taught(Sure(0.9), FLAT)) == [15]
    assert lengths(taught(Sure(0.9), STEEP)) == [0]
    assert lengths(taught(Sure(0.0), FLAT)) == [0]
    assert lengths(taught(Sure(0.5), BLOCKS)) == [3]
    assert lengths(taught(Sure(0.99), BLOCKS)) == [7]


@settings(max_examples=60, deadline=None)
@given(
    share=st.floats(0.05, 0.99),
    costs=st.lists(st.floats(1.0, 9.0), min_size=15, max_size=15),
    drafting=st.sampled_from([0.0, 0.2]),
)
def test_the_length_is_the_best_of_all(share: float, costs: list[float], drafting: float) -> None:
    """Expected tokens a second, of each length, by the definition."""
    times = [1.0, *costs]
    speculator = taught(Sure(share, seconds=drafting * 1e-3), times)
    ratios, plain = speculator._costs_of(1).ratios(15), speculator._costs_of(1).plain
    (length,) = lengths(speculator)
    rates = [
        sum(share**n for n in range(k + 1)) / (ratios[k] + drafting * 1e-3 * k / plain) for k in range(16)
    ]
    best = max(rates)
    if length == 0:
        assert best <= 1.03 + 1e-9
    else:
        assert rates[length] == pytest.approx(best)
    np.testing.assert_allclose(ratios[:16], np.array(times), rtol=0.35)


def test_the_likeliest_tokens_of_all_answers_share_a_step() -> None:
    speculator = taught(Sure(0.95, 0.3, 0.0), [3.0] * 6 + [30.0] * 10, answers=3)
    first, second, third = lengths(speculator, 3)
    assert first + second == 5
    assert first > second
    assert third == 0


def test_limits_are_kept() -> None:
    assert lengths(taught(Sure(0.99), FLAT), limit=4) == [4]
    assert lengths(taught(Sure(0.99), FLAT), limit=0) == [0]
    assert lengths(taught(Sure(0.99), FLAT), limit=-3) == [0]
    assert lengths(taught(Sure(0.99), FLAT), room=2) == [2]
    few = Speculator(Sure(0.99), max_rows=3)
    few.observe_step(1, 0, 0.003)
    few.observe_step(1, 0, 0.003)
    assert lengths(few) == [3]


def test_a_probe_is_short_and_rare() -> None:
    speculator = taught(Sure(0.15), [1.0, 1.25, 1.6, *[3.0] * 13])
    found = [lengths(speculator)[0] for _ in range(PROBE_AFTER * 4)]
    assert set(found) == {0, 1}
    assert sum(found) == 3


def test_forgetting_reaches_the_proposer() -> None:
    proposer = Sure(0.9)
    speculator, answer = Speculator(proposer), Answer()
    speculator.forget(answer)
    assert proposer.forgotten == [answer]


def test_costs_are_learned_and_outliers_count_little() -> None:
    costs = StepCosts(1)
    assert costs.ratios(3)[:4] == pytest.approx([1, 1.12, 1.24, 1.36])
    for _ in range(30):
        costs.observe(0, 0.003)
        costs.observe(2, 0.0039)
        costs.observe(3, 0.0036)
    assert costs.plain == pytest.approx(0.003)
    # Between what was measured there is a line, beyond it the slope of what was.
    assert costs.ratios(4)[:4] == pytest.approx([1, 1.15, 1.3, 1.2])
    assert 1.25 < costs.ratios(4)[4] < 1.35
    costs.observe(2, 0.3)
    assert costs.ratios(2)[2] < 1.5
    costs.observe(0, 3.0)
    assert costs.plain < 0.005


@pytest.mark.parametrize("per_token", [0.0, 0.05, 0.1])
def test_what_a_token_more_costs_is_learned_from_few_numbers(per_token: float) -> None:
    costs = StepCosts(16)
    for more in (0, 0, 30, 41, 33, 45, 38, 29, 44, 36, 40, 31):
        costs.observe(more, 0.01 * (1 + per_token * more))
    found = np.array(costs.ratios(48)[25:49])
    np.testing.assert_allclose(found, 1 + per_token * np.arange(25, 49), rtol=0.15, atol=0.3)


def test_a_plain_step_comes_first_and_now_and_then() -> None:
    """Else what more tokens cost could not be told from what every step does."""
    speculator, guesses = Speculator(Sure(0.99)), []
    for step in range(200):
        (length,) = lengths(speculator)
        guesses.append(length)
        speculator.observe_step(1, length, (0.003 if length == 0 else 0.0035) * (1 + step / 400))
    assert guesses[:2] == [0, 0]
    assert 3 <= guesses[2:].count(0) <= 5
    ratios = speculator._costs_of(1).ratios(15)
    assert ratios[15] == pytest.approx(0.0035 / 0.003, rel=0.15)


def test_acceptance_falls_quickly_and_comes_back() -> None:
    acceptance = Acceptance((0.7, 0.2))
    assert (acceptance.share(0), acceptance.share(1)) == pytest.approx((0.7, 0.2))
    for _ in range(6):
        acceptance.observe(0, False)
    assert acceptance.share(0) < 0.2
    assert acceptance.share(1) == pytest.approx(0.2)
    for _ in range(30):
        acceptance.observe(0, True)
    assert acceptance.share(0) > 0.8


def test_lookup_learns_without_guessing() -> None:
    """Where the words that follow a match are never the same again, its chances fall, though none of them was
    drafted; where they always are, they rise."""
    rng = np.random.default_rng(1)
    random, regular = Answer([1, 2, 3]), Answer([1, 2, 3])
    proposer = NgramProposer()
    first = None
    for _ in range(60):
        for answer, tokens in ((random, [1, 2, int(rng.integers(10, 10_000))]), (regular, [4, 5, 6])):
            answer.tokens += tokens
            proposer.chances(answer, 4)
        first = first or list(proposer.chances(regular, 4))
    # Now each text ends in two tokens that were there before.
    random.tokens += [1, 2]
    regular.tokens += [4, 5]
    chances = [list(proposer.chances(answer, 4)) for answer in (random, regular)]
    assert not chances[0] or chances[0][0] < 0.05
    assert chances[1][0] > 0.9
    assert proposer.draft([random, regular], [0, 4]) == [[], [6, 4, 5, 6]]
    proposer.forget(random)
    proposer.forget(random)
    assert proposer.chances(random, 1) is not None


def test_a_long_prompt_is_indexed_over_several_steps() -> None:
    answer, proposer = Answer([*range(500), 7, 8, 9]), NgramProposer()
    speculator = Eager(proposer)
    steps = 0
    while not speculator.propose([answer], [5], 100)[0]:
        steps += 1
        assert steps < 5
    assert steps == 1
    assert speculator.propose([answer], [5], 100)[0][0] == 10


def test_a_text_that_was_replaced_is_looked_at_anew() -> None:
    answer, proposer = Answer([5, 6, 7, 8, 5, 6]), NgramProposer()
    proposer.chances(answer, 2)
    assert proposer.draft([answer], [2]) == [[7, 8]]
    answer.tokens = [5, 6, 1, 2, 5, 6]
    proposer.chances(answer, 2)
    assert proposer.draft([answer], [2]) == [[1, 2]]


def test_a_look_before_several_steps_is_taken_off_once() -> None:
    times = iter([0.0, 0.001] * 2)
    speculator = Speculator(Sure(0.0), clock=lambda: next(times))
    for _ in range(2):
        assert lengths(speculator) == [0]
        # Four steps of 3 ms and the look's millisecond.
        speculator.observe_step(1, 0, 0.013 / 4, 4)
    assert speculator._costs_of(1).plain == pytest.approx(0.003)
