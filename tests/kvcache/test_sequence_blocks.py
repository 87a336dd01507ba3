"""A sequence's pages: they grow with it, belong to it alone, and all come back."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nybble.kvcache import KvCache, OutOfPagesError, block_table, pages_for


@settings(max_examples=100, deadline=None)
@given(
    page_size=st.sampled_from([1, 3, 16]),
    groups=st.integers(1, 3),
    moves=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), max_size=40),
)
def test_no_slot_ever_belongs_to_two_tokens(
    page_size: int, groups: int, moves: list[tuple[int, int]]
) -> None:
    cache = KvCache(12, page_size, (None, 30, 20)[:groups])
    pools = cache.pools
    sequences = [cache.sequence() for _ in range(4)]
    for which, count in moves:
        sequence = sequences[which]
        before = sequence.num_tokens, sequence.tables
        if count == 40:
            sequence.release()
            assert sequence.num_tokens == sequence.num_pages == 0
            continue
        needed = pages_for(sequence.num_tokens + count, page_size) - sequence.num_pages
        assert sequence.pages_needed(count) == needed
        if needed > pools[0].num_free:
            with pytest.raises(OutOfPagesError):
                sequence.append(count)
            assert (sequence.num_tokens, sequence.tables) == before
            continue
        sequence.append(count)
        # What was written stays where it was.
        assert all(new[: len(old)] == old for new, old in zip(sequence.tables, before[1], strict=True))

        for group in range(groups):
            slots = [s for q in sequences for s in q.slots(0, q.num_tokens)[group]]
            assert len(slots) == len(set(slots))
            assert all(0 <= s < 12 * page_size for s in slots)
            held = [page for q in sequences for page in q.tables[group]]
            assert len(held) == len(set(held)) == pools[group].num_used
    for sequence in sequences:
        sequence.release()
    assert all(pool.num_free == 12 for pool in pools)


def test_slots_follow_the_table() -> None:
    cache = KvCache(5, 4)
    other = cache.sequence()
    other.append(1)
    sequence = cache.sequence()
    sequence.append(3)
    other.append(4)
    sequence.append(3)
    table = sequence.tables[0]
    assert len(table) == 2
    expected = [table[t // 4] * 4 + t % 4 for t in range(6)]
    assert sequence.slots(0, 6) == [expected]
    assert sequence.slots(2, 3) == [expected[2:5]]
    assert sequence.slots(6, 0) == [[]]
    with pytest.raises(ValueError, match="outside the 6"):
        sequence.slots(4, 3)


def test_tables_of_sequences_make_one_array() -> None:
    cache = KvCache(5, 4, (None, 16))
    cache.pools[1].allocate(2)
    short, long, empty = cache.sequence(), cache.sequence(), cache.sequence()
    short.append(3)
    long.append(6)
    table = block_table([short, empty, long])
    assert table.dtype == np.int32
    for group in range(2):
        assert table[group].tolist() == [[*short.tables[group], -1], [-1, -1], [*long.tables[group]]]
    assert long.tables[0] != long.tables[1]


def test_append_over_groups_is_all_or_nothing() -> None:
    cache = KvCache(8, 2, (None, 16))
    cache.pools[1].allocate(6)
    sequence = cache.sequence()
    with pytest.raises(OutOfPagesError, match="3 KV pages are needed; 2 of 8 are free"):
        sequence.append(5)
    assert [pool.num_free for pool in cache.pools] == [8, 2]
    assert sequence.num_tokens == sequence.num_pages == 0
