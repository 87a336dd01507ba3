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
        self.pool.incref([block])
        self.held.append(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.pool.free([block])
        self.held.remove(block)

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
    blocks = pool.allocate(2)
    with pytest.raises(ValueError, match="freed twice"):
        pool.free([blocks[0], blocks[1], blocks[0]])
    assert pool.num_used == 2
    pool.free(blocks)
    with pytest.raises(ValueError, match="freed twice"):
        pool.free(blocks)
    assert pool.num_free == 4


def test_free_page_cannot_be_shared_and_strangers_are_refused() -> None:
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="is free"):
        pool.incref([0])
    for bad in (-1, 2):
        with pytest.raises(ValueError, match="does not exist"):
            pool.free([bad])
    with pytest.raises(ValueError, match="num_blocks"):
        BlockPool(0)
