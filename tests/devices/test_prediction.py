"""Predicted speeds: what every roofline must do. `benchmarks/plan.py` says how near they come, since no test
asserts time."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planned import INT4, LAPTOP, SMOLLM2

from nybble.devices import (
    MachineLimits,
    Rates,
    ReadRate,
    ResidencyPlan,
    RunSettings,
    Speeds,
    list_profiles,
    plan_memory,
    predict,
)
from nybble.devices.prediction import DOT, WIDENING
from nybble.models.spec import MixtureSpec

RUN = RunSettings(SMOLLM2, INT4, LAPTOP, context=2048, sequences=4, kv_dtype="f16", executor="cpu")
RATES = Rates(20e9, 300e9, 0.5e9)
READ = ReadRate(512 << 20, 20e9)


def speeds(run: RunSettings = RUN, rates: Rates = RATES, length: int = 512) -> Speeds:
    found = predict(run, plan_memory(run), rates, length)
    assert found is not None
    return found


def test_an_answer_is_no_faster_than_its_weights_are_read() -> None:
    weights = plan_memory(RUN).weights
    assert speeds().decode < RATES.bandwidth / weights
    assert speeds(rates=Rates(20e9, 1e15)).decode == pytest.approx(RATES.bandwidth / weights, rel=0.4)


def test_of_what_is_read_again_and_again_the_cache_keeps_a_part() -> None:
    weights = plan_memory(RUN).weights
    cached = replace(RATES, cached_bytes=weights / 4)
    assert 1.1 * speeds().decode < speeds(rates=cached).decode < speeds().decode / 0.75
    # A cache that would hold it all is read no more than twice as fast.
    ten, thousand = (speeds(rates=replace(RATES, cached_bytes=n * weights)) for n in (10, 1000))
    assert ten == thousand
    assert ten.decode < 2 * speeds().decode


def test_a_prompt_is_no_faster_than_its_products() -> None:
    operations = 2 * (134_515_008 - SMOLLM2.vocab_size * SMOLLM2.hidden_size)
    assert speeds().prefill < RATES.integer_rate / operations
    assert speeds().first_token == pytest.approx(512 / speeds().prefill)


@given(
    bandwidth=st.floats(1e9, 1e12),
    rate=st.floats(1e10, 1e14),
    length=st.integers(1, 2000),
    more=st.floats(1, 10),
)
def test_more_of_anything_is_never_slower(bandwidth: float, rate: float, length: int, more: float) -> None:
    base = speeds(rates=Rates(bandwidth, rate), length=length)
    for better in (Rates(bandwidth * more, rate), Rates(bandwidth, rate * more)):
        faster = speeds(rates=better, length=length)
        assert faster.decode >= base.decode * (1 - 1e-9)
        assert faster.prefill >= base.prefill * (1 - 1e-9)
    assert base.decode_all >= base.decode * (1 - 1e-9)
    assert speeds(rates=Rates(bandwidth, rate), length=length + 40).decode <= base.decode


def test_streamed_weights_come_no_faster_than_the_disk_gives_them() -> None:
    run = replace(RUN, residency=ResidencyPlan.spread(30, 15))
    streamed = plan_memory(RUN).linears - plan_memory(run).linears
    assert speeds(run).decode == pytest.approx(RATES.disk_bandwidth / streamed, rel=0.02)
    assert speeds(run).decode_all == pytest.approx(4 * speeds(run).decode)
    assert speeds(run, replace(RATES, disk_bandwidth=1e12)).decode == speeds().decode


def test_of_streamed_experts_those_are_read_that_are_chosen_and_not_in_memory() -> None:
    """Were each as likely as another: of all that are chosen, the share that has no slot."""
    mixture = MixtureSpec(tuple(range(30)), 16, 2, 1536, True)
    slow = replace(RATES, disk_bandwidth=1e6)
    run = replace(RUN, spec=replace(SMOLLM2, mixture=mixture), sequences=1)
    whole = plan_memory(run).linears

    def seconds(slots: int, sequences: int = 1) -> float:
        some = replace(run, residency=ResidencyPlan(30, expert_slots=slots), sequences=sequences)
        found = predict(some, plan_memory(some), slow)
        assert found is not None
        return sequences / found.decode_all

    experts = whole - plan_memory(replace(run, residency=ResidencyPlan(30, expert_slots=2))).linears
    for slots in (120, 240, 360):
        expected = experts * 2 / 16 * (1 - slots / 480) / 1e6
        assert seconds(slots) == pytest.approx(expected, rel=0.02)
    chosen = 1 - (1 - 2 / 16) ** 8
    assert seconds(240, 8) == pytest.approx(experts * chosen / 2 / 1e6, rel=0.02)


def test_a_mixture_is_planned_with_all_experts_and_reads_those_that_are_chosen() -> None:
    def run(experts: int, per_token: int) -> RunSettings:
        mixture = MixtureSpec(tuple(range(30)), experts, per_token, 1536, True)
        return replace(RUN, spec=replace(SMOLLM2, mixture=mixture), sequences=1)

    dense, one_of_8, two_of_8 = replace(RUN, sequences=1), run(8, 1), run(8, 2)
    mlp = 3 * 30 * 1536 * 576 * 4.5 / 8  # bytes, with a scale of 16 bits for 32
    plan = plan_memory(one_of_8)
    assert plan.linears == plan_memory(two_of_8).linears
    assert plan.linears - plan_memory(dense).linears == pytest.approx(7 * mlp, rel=0.1)
    assert speeds(one_of_8).decode == pytest.approx(speeds(dense).decode, rel=0.1)
    assert speeds(one_of_8).decode > 1.2 * speeds(two_of_8).decode
    # Sixteen sequences choose nearly all experts between them.
    many = replace(one_of_8, sequences=16)
    assert speeds(many).decode_all < 16 * speeds(one_of_8).decode / 2


def test_what_is_not_known_is_not_predicted() -> None:
    plan = plan_memory(RUN)
    assert predict(RUN, plan, None) is None
    streamed = replace(RUN, residency=ResidencyPlan.spread(30, 15))
    assert predict(streamed, plan_memory(streamed), Rates(20e9, 300e9)) is None
    on_ort = replace(RUN, executor="ort")
    assert predict(on_ort, plan_memory(on_ort), RATES) is None
    assert Rates.of(replace(LAPTOP, bandwidth=None)) is None
    assert Rates.of(replace(LAPTOP, integer_rate=None)) is None


@pytest.mark.parametrize(("isa", "efficiency"), [("avx2", WIDENING), ("scalar", WIDENING), ("neondot", DOT)])
def test_what_the_kernels_reach_depends_on_the_instruction_set(isa: str, efficiency: object) -> None:
    assert Rates.measured(MachineLimits(2, isa, READ, READ, 300e9)).efficiency is efficiency


def test_every_profile_says_enough_to_predict_a_speed() -> None:
    for profile in list_profiles():
        assert Rates.of(profile) is not None, profile.name
