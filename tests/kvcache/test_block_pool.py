"""What the block pool promises: a page has one owner or counted ones, and never appears twice."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nybble.errors import NybbleError
from nybble.kvcache import BlockPool, OutOfPagesError


class PoolMachine(RuleBasedStateMachine):
    """Random allocations, shares and frees against a plain multiset of what is held."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(7)
        self.held: list[int] = []

    @rule(count=st.integers(0, 9))
    def allocate(self, count: int) -> None:
        free = 7 - len(set(self.held))
        if count > free:
            with pytest.raises(OutOfPagesError):
                self.pool.allocate(count)
            return
        blocks = self.pool.allocate(count)
        assert len(blocks) == count
        assert len(set(blocks)) == count
        assert not set(blocks) & set(self.held)
        self.held += blocks

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.held.append(block)
        assert self.pool.incref(block) == self.held.count(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.held.remove(block)
        assert self.pool.decref(block) == self.held.count(block)

    @invariant()
    def counts_agree(self) -> None:
        assert [self.pool.references(b) for b in range(7)] == [self.held.count(b) for b in range(7)]
        assert self.pool.num_used == len(set(self.held))
        assert self.pool.num_free + self.pool.num_used == self.pool.num_blocks == 7


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(st.integers(1, 20), st.integers(0, 40))
def test_exhaustion_names_the_numbers_and_takes_nothing(size: int, count: int) -> None:
    pool = BlockPool(size)
    if count <= size:
        assert len(pool.allocate(count)) == count
        return
    with pytest.raises(OutOfPagesError, match=f"{count} KV pages .* {size} of {size} are free") as caught:
        pool.allocate(count)
    assert isinstance(caught.value, NybbleError)
    assert pool.num_free == size


def test_double_free_raises_and_changes_nothing() -> None:
    pool = BlockPool(4)
    block, other = pool.allocate(2)
    assert pool.decref(block) == 0
    with pytest.raises(ValueError, match=f"page {block} is freed twice"):
        pool.decref(block)
    assert pool.num_used == pool.references(other) == 1
    assert pool.references(block) == 0


def test_free_page_cannot_be_shared_and_strangers_are_refused() -> None:
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="is free"):
        pool.incref(0)
    for bad in (-1, 2):
        for call in (pool.incref, pool.decref, pool.references):
            with pytest.raises(ValueError, match="does not exist"):
                call(bad)
    with pytest.raises(ValueError, match="num_blocks"):
        BlockPool(0)


def test_a_page_just_freed_is_the_next_to_be_used() -> None:
    pool = BlockPool(9)
    pool.allocate(2)
    table = pool.allocate(3)
    for block in reversed(table):
        pool.decref(block)
    assert pool.allocate(3) == table
