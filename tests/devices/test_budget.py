"""Runs made to fit: what is given up for it, in which order, and what is said where nothing helps."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planned import INT4, LAPTOP, MIXTURE, SMOLLM2

from nybble.devices import (
    MemoryPlan,
    ResidencyPlan,
    RunSettings,
    load_profile,
    plan_memory,
    plan_within,
    smallest_plan,
    ways_to_fit,
)
from nybble.errors import DoesNotFitError

RUN = RunSettings(SMOLLM2, INT4, LAPTOP, context=1024, kv_dtype="f16", executor="cpu")
RESIDENT = plan_memory(RUN).total
LEAST = smallest_plan(RUN).total


def given_up(plan: MemoryPlan) -> tuple[int, int, int, bool]:
    """Sequences that do not run at once, tokens taken from a step, layers streamed, whether the head is."""
    residency = plan.residency
    return (
        16 - plan.sequences,
        512 - plan.token_budget,
        len(residency.streamed_layers),
        residency.streamed_head,
    )


@given(budget=st.integers(LEAST, 2 * RESIDENT), more=st.integers(0, RESIDENT))
def test_every_budget_is_kept_and_more_memory_gives_up_no_more(budget: int, more: int) -> None:
    small, large = (plan_within(RUN, size, max_sequences=16) for size in (budget, budget + more))
    assert small.total <= budget
    assert small.kv_dtype == "f16"
    assert small.num_pages * 16 >= 1024
    streamed = [(len(p.residency.streamed_layers), p.residency.streamed_head) for p in (small, large)]
    assert streamed[1] <= streamed[0]
    if streamed[1] == streamed[0] == (0, False) and small.token_budget == large.token_budget:
        assert given_up(large) <= given_up(small)


def test_everything_stays_in_memory_where_it_fits() -> None:
    plan = plan_within(RUN, RESIDENT)
    assert not plan.residency.streams
    assert plan.concessions == ()
    assert plan.total == RESIDENT


def test_sequences_wait_before_anything_else_is_given_up() -> None:
    plan = plan_within(RUN, plan_memory(replace(RUN, sequences=3)).total, max_sequences=16)
    assert given_up(plan) == (13, 0, 0, False)
    assert plan.concessions == ("3 of 16 sequences run at once",)


def test_steps_become_smaller_before_layers_are_streamed() -> None:
    assert given_up(plan_within(RUN, RESIDENT - 1, max_sequences=16)) == (15, 256, 0, False)


def test_as_few_layers_are_streamed_as_need_be_at_equal_distances() -> None:
    twelve = ResidencyPlan.spread(30, 12, buffers=4)
    budget = plan_memory(replace(RUN, residency=twelve, token_budget=64)).total
    plan = plan_within(RUN, budget)
    layers = plan.residency.streamed_layers
    assert len(layers) == 12
    assert not plan.residency.streamed_head
    distances = {after - before for before, after in pairwise(layers)}
    assert max(distances) - min(distances) <= 1
    fewer = replace(plan.residency, streamed_layers=layers[:-1])
    assert not plan_memory(replace(RUN, budget=budget, residency=fewer)).fits
    assert f"{len(layers)} of 30 layers are streamed" in plan.concessions


def test_small_layers_are_read_through_a_buffer_more() -> None:
    wide = replace(SMOLLM2, hidden_size=1152, intermediate_size=3072, num_heads=18)
    for spec, buffers in ((SMOLLM2, 4), (wide, 3)):
        run = replace(RUN, spec=spec)
        plan = plan_within(run, (smallest_plan(run).total + plan_memory(run).total) // 2)
        assert 0 < len(plan.residency.streamed_layers) < 30
        assert plan.residency.buffers == buffers


def test_the_least_has_all_weights_streamed_through_two_buffers() -> None:
    plan = plan_within(RUN, LEAST, max_sequences=16)
    assert given_up(plan) == (15, 448, 30, True)
    assert plan.residency.buffers == 2
    assert plan.ends == plan.linears == 0
    assert plan.concessions[-2:] == ("30 of 30 layers are streamed", "the head is streamed")


def test_the_cache_has_another_type_only_where_that_is_allowed_and_nothing_else_helps() -> None:
    with pytest.raises(DoesNotFitError):
        plan_within(RUN, LEAST - 1)
    plan = plan_within(RUN, LEAST - 1, kv_dtypes=["int8"])
    assert plan.kv_dtype == "int8"
    assert plan.concessions[-1] == "the KV cache is int8, not f16"
    assert plan_within(RUN, LEAST, kv_dtypes=["int8"]).kv_dtype == "f16"


def test_a_budget_under_the_least_is_refused_at_once_with_the_numbers() -> None:
    big = replace(
        SMOLLM2, hidden_size=1536, intermediate_size=8960, num_layers=80, num_heads=12, vocab_size=151936
    )
    with pytest.raises(DoesNotFitError) as caught:
        plan_within(replace(RUN, spec=big, context=8192), 400_000_000, max_sequences=16)
    message = str(caught.value)
    assert "\n" not in message
    for part in (
        "needs at least", "memory budget is 400 MB", "weights", "buffers of streamed weights", "KV cache",
        "activations", "tokenizer", "interpreter", "what would fit: a context of",
    ):  # fmt: skip
        assert part in message


EXPERTS = replace(RUN, spec=MIXTURE)
ALL_EXPERTS = 48 * 128


def test_experts_leave_memory_before_what_every_token_goes_through() -> None:
    least, resident = smallest_plan(EXPERTS).total, plan_memory(EXPERTS).total
    plans = [plan_within(EXPERTS, least + (resident - least) * part // 40) for part in range(41)]
    assert not plans[-1].residency.streams
    slots = [plan.residency.expert_slots or ALL_EXPERTS for plan in plans]
    assert slots == sorted(slots)
    assert len(set(slots)) > 35
    for plan in plans:
        assert plan.total <= (plan.budget or 0)
        residency = plan.residency
        if residency.streamed_layers:
            assert residency.expert_slots <= 8
    # A sixty-fourth of them less leaves less unused than that.
    some = plans[20].residency
    more = replace(some, expert_slots=some.expert_slots + ALL_EXPERTS // 64)
    assert not plan_memory(replace(EXPERTS, token_budget=64, residency=more, budget=plans[20].budget)).fits
    said = f"{some.expert_slots} of {ALL_EXPERTS} experts are in memory, the others streamed"
    assert said in plans[20].concessions
    assert (plans[0].residency.expert_slots, plans[0].residency.buffers) == (2, 2)


def test_a_mixture_does_with_much_less_than_a_layer_of_it() -> None:
    """Two buffers of whole layers were the least before."""
    whole = ResidencyPlan.spread(48, 48, streamed_head=True, buffers=2)
    by_layers = plan_memory(replace(EXPERTS, token_budget=64, residency=whole))
    least = smallest_plan(EXPERTS)
    assert least.buffers < by_layers.buffers / 10
    assert least.total < by_layers.total - 600_000_000


@pytest.mark.parametrize("room", [10_000_000, 30_000_000, 100_000_000])
def test_what_is_said_to_fit_does(room: int) -> None:
    """Each way's peak is in the budget; fewer changes come first."""
    run = replace(RUN, context=8192, sequences=4, recipe=replace(INT4, bits=8))
    budget = smallest_plan(replace(run, context=1)).total + room
    ways = ways_to_fit(replace(run, budget=budget))
    assert len(ways) == 3
    assert all(way.total <= budget for way in ways)
    changes = [way.change.count(" and ") for way in ways]
    assert changes == sorted(changes)


def test_nothing_is_said_to_fit_where_nothing_does() -> None:
    assert ways_to_fit(replace(RUN, budget=40_000_000)) == ()
    with pytest.raises(DoesNotFitError, match="no context would fit, since one token needs"):
        plan_within(RUN, 40_000_000)


def test_fewer_bits_are_named_where_they_would_do() -> None:
    run = replace(RUN, recipe=replace(INT4, bits=8), budget=RESIDENT)
    assert "4 bits" in [way.change for way in ways_to_fit(run)]


def test_of_as_many_changes_the_fastest_comes_first() -> None:
    fast = replace(load_profile("laptop-cpu"), bandwidth=50e9, integer_rate=2e12, disk_bandwidth=5e8)
    ways = ways_to_fit(replace(RUN, profile=fast, sequences=2, budget=RESIDENT))
    speeds = [way.decode or 0 for way in ways if " and " not in way.change]
    assert len(speeds) >= 2
    assert speeds == sorted(speeds, reverse=True)
