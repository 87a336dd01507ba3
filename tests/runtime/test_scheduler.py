"""The scheduler and the cache without a model."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nybble.errors import DeadlineExceeded, DoesNotFitError, QueueFull
from nybble.kvcache import KvCache, OutOfPagesError
from nybble.runtime.scheduler import Scheduler, StepPlan
from nybble.runtime.sequence_state import SequenceState, shape_of


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Driver:
    """Runs steps as an engine does; each token that is chosen is the sequence's number."""

    def __init__(self, pages: int = 64, page_size: int = 4, windows: Any = (None,), **options: Any) -> None:
        self.clock = Clock()
        self.cache = KvCache(pages, page_size, windows, share_prefixes=options.pop("share_prefixes", True))
        settings = {"max_batch_tokens": 32, "max_sequences": 8, "target_seconds": 1e9, **options}
        self.scheduler: Scheduler[SequenceState] = Scheduler(self.cache, clock=self.clock, **settings)
        self.lengths: dict[SequenceState, int] = {}
        self.ended: list[SequenceState] = []
        self.computed = 0
        self.plan: StepPlan[SequenceState] = StepPlan()

    def add(self, tokens: list[int], answer: int = 5, **options: Any) -> SequenceState:
        sequence = SequenceState(list(tokens), self.cache.sequence(), **options)
        self.scheduler.add(sequence)
        self.lengths[sequence] = len(tokens) + answer
        return sequence

    def step(self) -> list[tuple[SequenceState, int]]:
        """Which sequences ran, and how many tokens of each."""
        self.clock.now += 1
        self.plan = self.scheduler.schedule()
        for sequence, _ in self.plan.failed:
            del self.lengths[sequence]
        ran = [(chunk.sequence, chunk.count) for chunk in self.plan.chunks]
        shape = shape_of(self.plan.chunks)
        for chunk in self.plan.chunks:
            sequence = chunk.sequence
            self.computed += chunk.count
            if chunk.completes:
                sequence.tokens.append(1_000_000 + sequence.order[1])
            self.scheduler.advance(chunk, chunk.count)
            if len(sequence.tokens) >= self.lengths[sequence]:
                self.end(sequence)
        if ran:
            self.scheduler.observe(shape, 0.01)
        self.check()
        return ran

    def end(self, sequence: SequenceState) -> None:
        self.scheduler.remove(sequence)
        del self.lengths[sequence]
        self.ended.append(sequence)

    def run(self) -> None:
        for _ in range(20_000):
            if not self.lengths:
                break
            self.step()
        assert not self.lengths, "some never end"
        assert self.cache.pages_available == self.cache.num_blocks - self.cache.pages_pinned

    def check(self) -> None:
        self.cache.check()
        running = self.scheduler.running
        assert [s.order for s in running] == sorted(s.order for s in running)
        assert all(s.is_running for s in running)
        assert len(running) + len(self.scheduler.waiting) == len(self.lengths)
        waiting = [s for s in self.lengths if not s.is_running]
        assert all(s.blocks.num_pages == s.computed == 0 for s in waiting)
        assert self.scheduler.waiting.num_tokens == sum(len(s.tokens) for s in waiting)


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=length)


ARRIVAL = st.tuples(
    st.integers(0, 40),  # the step it comes before
    st.integers(0, 2),  # which beginning it has
    st.integers(0, 30),  # how much of it
    st.integers(1, 12),  # tokens of its own
    st.integers(1, 30),  # of the answer
    st.sampled_from([0, 0, 0, 1, -1]),  # class
    st.sampled_from([None, None, None, 4]),  # steps after which it is aborted
)


@settings(max_examples=400)
@given(
    arrivals=st.lists(ARRIVAL, max_size=14),
    pages=st.integers(18, 60),
    max_batch_tokens=st.integers(1, 40),
    max_sequences=st.integers(1, 8),
    windows=st.sampled_from([(None,), (None,), (None, 6), (9,)]),
    target=st.sampled_from([1e9, 1e-9, None]),
    faults=st.sets(st.integers(0, 60), max_size=6),
)
def test_any_traffic_comes_to_its_end_within_the_budget(
    arrivals: list[Any], pages: int, max_batch_tokens: int, max_sequences: int, windows: Any,
    target: float | None, faults: set[int],
) -> None:  # fmt: skip
    driver = Driver(
        pages, windows=windows, max_batch_tokens=max_batch_tokens, max_sequences=max_sequences,
        target_seconds=target,
    )  # fmt: skip
    stems = [prompt(seed, 30) for seed in range(3)]
    added: dict[int, SequenceState] = {}
    for step in range(60):
        for number, (at, stem, length, own, answer, priority, _) in enumerate(arrivals):
            if at == step:
                tokens = stems[stem][:length] + prompt(number, own)
                added[number] = driver.add(tokens, answer, priority=priority)
        for number, (at, *_, abort) in enumerate(arrivals):
            if abort is not None and step == at + abort and added[number] in driver.lengths:
                driver.end(added[number])
        if step in faults and driver.scheduler.running:
            fail_once(driver.scheduler.running[step % len(driver.scheduler.running)])
        ran = driver.step()
        assert sum(count for _, count in ran) <= max_batch_tokens
        assert len({id(sequence) for sequence, _ in ran}) == len(ran) <= max_sequences
        assert not driver.plan.failed
    driver.run()
    assert len(driver.ended) == len(arrivals)


def fail_once(sequence: SequenceState) -> None:
    def append(count: int) -> None:
        del sequence.blocks.append  # type: ignore[method-assign]
        raise OutOfPagesError("injected")

    sequence.blocks.append = append  # type: ignore[method-assign]


def test_several_prompts_share_a_step_after_the_decodes() -> None:
    driver = Driver(max_batch_tokens=20)
    one = driver.add(prompt(0, 5), 9)
    driver.step()
    two, three, four = (driver.add(prompt(n, 8)) for n in (1, 2, 3))
    assert driver.step() == [(one, 1), (two, 8), (three, 8), (four, 3)]
    assert driver.step() == [(one, 1), (two, 1), (three, 1), (four, 5)]


def test_a_higher_class_comes_first_and_waiting_makes_up_for_a_lower_one() -> None:
    driver = Driver(max_sequences=1, ageing_seconds=10, share_prefixes=False)
    driver.add(prompt(0, 4), 1)
    low = driver.add(prompt(1, 4), 1, priority=-1)
    normal = driver.add(prompt(2, 4), 1)
    high = driver.add(prompt(3, 4), 1, priority=1)
    driver.clock.now = 15  # later than ten seconds after `low`
    late = driver.add(prompt(4, 4), 1)
    driver.run()
    assert driver.ended[1:] == [high, normal, low, late] or driver.ended == [high, *driver.ended[1:]]
    assert driver.ended.index(low) < driver.ended.index(late)


@given(interval=st.integers(1, 4), ageing=st.sampled_from([1.0, 20.0]), seed=st.integers(0, 99))
@settings(max_examples=30)
def test_nobody_starves_while_more_urgent_ones_keep_coming(interval: int, ageing: float, seed: int) -> None:
    driver = Driver(pages=16, max_sequences=2, ageing_seconds=ageing)
    low = driver.add(prompt(seed, 10), 5, priority=-1)
    for number in range(400):
        if low not in driver.lengths:
            break
        if number % interval == 0:
            driver.add(prompt(1000 + number, 12), 8, priority=0)
        driver.step()
    assert low in driver.ended
    assert driver.clock.now < 10 * ageing + 100


def test_the_last_in_the_order_is_preempted_and_keeps_its_place() -> None:
    driver = Driver(pages=10, share_prefixes=False)
    high = driver.add(prompt(2, 8), 20, priority=1)
    old, young = driver.add(prompt(0, 8), 20), driver.add(prompt(1, 8), 20)
    preempted = []
    while driver.lengths:
        before = list(driver.scheduler.running)
        driver.step()
        preempted += [s for s in before if not s.is_running and s in driver.lengths]
    assert preempted
    assert preempted[0] is young
    assert high not in preempted
    assert driver.ended == [high, old, young]
    assert young.preemptions + old.preemptions == driver.scheduler.preemptions


def test_a_preempted_sequence_finds_its_pages_in_the_tree() -> None:
    driver = Driver(pages=14)
    driver.add(prompt(0, 16), 20)
    young = driver.add(prompt(1, 16), 20)
    for _ in range(100):
        if young.preemptions:
            break
        driver.step()
    assert young.preemptions
    driver.run()
    # Of what it had computed most is still there when it goes on.
    assert 2 * (16 + 19) <= driver.computed < 2 * (16 + 19) + 16


def test_a_waiting_one_of_a_higher_class_takes_the_place_of_a_lower_one() -> None:
    driver = Driver(max_sequences=2, ageing_seconds=10)
    old, young = driver.add(prompt(0, 4), 20), driver.add(prompt(1, 4), 20)
    driver.step()
    driver.step()
    high = driver.add(prompt(2, 4), 3, priority=1)
    assert {id(s) for s, _ in driver.step()} == {id(old), id(high)}
    assert (young.preemptions, old.preemptions) == (1, 0)
    driver.run()
    assert driver.ended[0] is high


def test_one_that_has_waited_long_is_not_pushed_aside() -> None:
    driver = Driver(max_sequences=1, ageing_seconds=10)
    low = driver.add(prompt(0, 4), 30)
    for _ in range(15):
        driver.step()
    driver.add(prompt(1, 4), 3, priority=1)
    driver.step()
    assert low.is_running


@pytest.mark.parametrize("budget", [16, 64, 500])
def test_many_with_one_beginning_compute_it_once(budget: int) -> None:
    driver = Driver(pages=200, max_batch_tokens=budget, max_sequences=16)
    stem = prompt(0, 100)
    for number in range(16):
        driver.add([*stem, 5000 + number, 6000 + number, 7000 + number], 4)
    driver.run()
    # Three tokens of its own each, and three of the answer that are computed.
    assert driver.computed == 100 + 16 * 6
    assert driver.cache.statistics.hit_tokens == 15 * 100


def test_one_that_shares_nothing_goes_before_those_that_wait_for_a_prefix() -> None:
    driver = Driver(pages=200, max_batch_tokens=20)
    stem = prompt(0, 100)
    leader = driver.add([*stem, 1], 4)
    follower = driver.add([*stem, 2], 4)
    assert driver.step() == [(leader, 20)]
    other = driver.add(prompt(9, 8), 4)
    for _ in range(4):
        driver.step()
    assert leader.remaining <= 1
    assert {id(s) for s, _ in driver.step()} == {id(leader), id(follower), id(other)}


def test_a_follower_goes_on_when_its_leader_leaves() -> None:
    driver = Driver(pages=200, max_batch_tokens=20)
    stem = prompt(0, 100)
    leader, follower = driver.add([*stem, 1], 4), driver.add([*stem, 2], 4)
    driver.step()
    driver.step()
    assert not follower.is_running
    driver.end(leader)
    assert driver.step() == [(follower, 20)]
    assert follower.hit_tokens == 40


def test_a_full_queue_refuses_and_says_the_numbers() -> None:
    driver = Driver(max_waiting=2, max_waiting_tokens=30)
    driver.add(prompt(0, 10))
    driver.add(prompt(1, 10))
    with pytest.raises(QueueFull, match="2 requests are waiting; max_waiting is 2"):
        driver.add(prompt(2, 10))
    driver.step()
    driver.add(prompt(3, 25))
    with pytest.raises(
        QueueFull, match="25 tokens are waiting, and the request has 6; max_waiting_tokens is 30"
    ):
        driver.add(prompt(4, 6))
    driver.add(prompt(4, 5))


def test_deadlines_end_what_waits_and_what_runs() -> None:
    driver = Driver(max_sequences=1)
    running = driver.add(prompt(0, 4), 100, deadline=10.5)
    waiting = driver.add(prompt(1, 4), 4, deadline=5.5)
    ended_before = driver.add(prompt(2, 4), 1, deadline=100.0, priority=5)
    failed = []
    while driver.clock.now < 12:
        driver.step()
        failed += [(driver.clock.now, sequence) for sequence, _ in driver.plan.failed]
        assert all(isinstance(error, DeadlineExceeded) for _, error in driver.plan.failed)
    assert failed == [(6.0, waiting), (11.0, running)]
    assert driver.ended == [ended_before]
    assert driver.cache.pages_available == 64
    assert not len(driver.scheduler._deadlines)


def test_what_pinned_prefixes_leave_no_room_for_fails_with_the_numbers() -> None:
    driver = Driver(pages=8)
    pinned = driver.add(prompt(0, 24), 1)
    driver.run()
    assert driver.cache.pin(pinned.tokens) == 24
    driver.add(prompt(1, 12), 8)
    for _ in range(20):
        driver.step()
        if driver.plan.failed:
            break
    ((_, error),) = driver.plan.failed
    assert isinstance(error, DoesNotFitError)
    assert "12 tokens find no pages" in str(error)
    assert "6 pinned" in str(error)


def test_drafts_take_no_pages_from_others() -> None:
    proposed: list[int] = []

    def propose(sequences: Sequence[SequenceState], room: int) -> list[list[int]]:
        proposed.append(room)
        return [[7] * (room // len(sequences)) for _ in sequences]

    driver = Driver(pages=6, propose=propose, max_batch_tokens=64, share_prefixes=False)
    one, two = driver.add(prompt(0, 10), 10), driver.add(prompt(1, 10), 10)
    driver.step()
    plan = driver.scheduler.schedule()
    assert proposed[-1] == 62
    # Six pages are held, with room for two tokens each: for none of the drafts.
    assert [(chunk.sequence, chunk.count, list(chunk.draft)) for chunk in plan.chunks] == [
        (one, 1, []),
        (two, 1, []),
    ]


def test_several_steps_are_taken_where_all_decode_and_there_are_pages() -> None:
    driver = Driver(pages=6, count_steps=lambda sequences: 6)
    one = driver.add(list(range(7)), answer=9)
    driver.step()
    assert [chunk.steps for chunk in driver.plan.chunks] == [1]  # a prompt's
    driver.step()
    assert [chunk.steps for chunk in driver.plan.chunks] == [6]
    assert one.blocks.num_tokens == one.computed == 8  # of which one was taken: the rest goes back
    driver.add(list(range(50, 57)), answer=9)
    driver.step()
    assert [chunk.steps for chunk in driver.plan.chunks] == [1, 1]  # a prompt runs beside it
    driver.step()
    # Two pages are left for twelve tokens: a step, with nobody asked for pages in vain.
    assert [chunk.steps for chunk in driver.plan.chunks] == [1, 1]
    assert driver.scheduler.allocation_failures == driver.scheduler.preemptions == 0
    driver.run()


def test_a_rejected_draft_gives_its_pages_back() -> None:
    driver = Driver(pages=16, propose=lambda sequences, room: [[7] * 9 for _ in sequences])
    sequence = driver.add(prompt(0, 10), 10)
    driver.step()
    (chunk,) = driver.scheduler.schedule().chunks
    assert (chunk.count, chunk.tokens[1:]) == (10, [7] * 9)
    assert sequence.blocks.num_pages == 5
    sequence.tokens += [7, 7, 8]
    driver.scheduler.advance(chunk, 3)
    assert (sequence.computed, sequence.blocks.num_tokens, sequence.remaining) == (13, 13, 1)
    assert sequence.blocks.num_pages == 4
    driver.cache.check()
