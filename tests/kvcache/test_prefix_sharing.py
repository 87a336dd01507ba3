"""What a request gains from those before it, and what sharing costs."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nybble.kvcache import KvCache, OutOfPagesError, PageCopy, SequenceBlocks
from nybble.kvcache.invariants import check_tree


def run(cache: KvCache, tokens: list[int]) -> SequenceBlocks:
    """A sequence of these tokens, computed and in the tree."""
    blocks = cache.sequence()
    computed = cache.adopt(blocks, tokens)
    blocks.append(len(tokens) - computed)
    cache.insert(blocks, tokens, len(tokens))
    return blocks


def test_full_pages_are_shared_and_the_next_is_copied() -> None:
    cache = KvCache(10, 4)
    first = run(cache, list(range(11)))
    assert cache.match(list(range(11))) == 8
    second = cache.sequence()
    tokens = [*range(7), 99, 98]
    assert cache.match(tokens) == cache.adopt(second, tokens) == 7
    (one,), (other,) = first.tables, second.tables
    assert other[0] == one[0]
    assert other[1] not in one
    assert cache.take_copies() == [PageCopy(0, one[1], other[1])]
    assert cache.take_copies() == []
    cache.check()


@settings(max_examples=300, deadline=None)
@given(
    page_size=st.integers(1, 4),
    kept=st.lists(st.lists(st.integers(0, 2), max_size=9), max_size=8),
    tokens=st.lists(st.integers(0, 2), max_size=9),
)
def test_the_longest_common_beginning_is_found(
    page_size: int, kept: list[list[int]], tokens: list[int]
) -> None:
    cache = KvCache(100, page_size, min_shared_tokens=1)
    for each in kept:
        run(cache, each).release()
    full = [each[: len(each) // page_size * page_size] for each in kept]
    pairs = [zip(each, tokens[:-1], strict=False) for each in full]
    longest = [len(list(takewhile(lambda pair: pair[0] == pair[1], each))) for each in pairs]
    assert cache.match(tokens) == max(longest, default=0)
    cache.check()


def test_the_last_token_is_always_left_to_compute() -> None:
    cache = KvCache(10, 4)
    run(cache, list(range(8)))
    for length, expected in ((8, 7), (5, 4), (9, 8), (1, 0), (0, 0)):
        assert cache.match(list(range(length))) == expected


def test_where_there_is_no_page_for_the_copy_full_pages_are_shared() -> None:
    cache = KvCache(3, 4)
    run(cache, list(range(12)))
    blocks = cache.sequence()
    assert cache.match(list(range(8))) == 7
    assert cache.adopt(blocks, list(range(8))) == 4
    assert cache.take_copies() == []
    assert blocks.num_pages == 1


def test_matches_that_save_little_are_not_used() -> None:
    cache = KvCache(10, 2, min_shared_tokens=6)
    run(cache, list(range(10)))
    assert cache.match([0, 1, 2, 3, 4, 9]) == 0
    assert cache.match([0, 1, 2, 3, 4, 5, 9]) == 6
    assert KvCache(10, 4, share_prefixes=False).match([1, 2]) == 0


def test_without_sharing_nothing_is_kept() -> None:
    cache = KvCache(4, 2, share_prefixes=False)
    run(cache, [1, 2, 3, 4]).release()
    assert cache.pools[0].num_free == 4
    assert cache.match([1, 2, 3, 4]) == 0
    assert cache.pin([1, 2, 3, 4]) == 0


def test_a_page_computed_twice_is_kept_once() -> None:
    cache = KvCache(8, 2)
    tokens = [1, 2, 3, 4, 5]
    blocks = [cache.sequence() for _ in range(2)]
    for each in blocks:
        each.append(5)
    assert cache.pools[0].num_used == 6
    for each in blocks:
        cache.insert(each, tokens, 5)
    assert cache.pools[0].num_used == 4
    (one,), (other,) = (each.tables for each in blocks)
    assert one[:2] == other[:2]
    assert one[2] != other[2]
    assert cache.statistics.shared_pages == 2
    cache.check()


def test_a_prefill_takes_over_what_another_computed_meanwhile() -> None:
    cache = KvCache(12, 2)
    tokens = list(range(9))
    ahead, behind = cache.sequence(), cache.sequence()
    for each, computed in ((ahead, 6), (behind, 2)):
        each.append(8)
        cache.insert(each, tokens, computed)
    assert cache.extend(behind, tokens, 2) == 6 == behind.num_tokens
    assert behind.tables[0] == ahead.tables[0][:3]
    assert cache.extend(behind, tokens, 6) == 6
    behind.append(1)
    assert cache.extend(behind, tokens, 7) == 7, "in the middle of a page there is nothing to take over"
    cache.check()


def test_a_fork_shares_all_pages_until_it_writes() -> None:
    cache = KvCache(6, 4)
    blocks = cache.sequence()
    blocks.append(6)
    forks = [blocks.fork() for _ in range(3)]
    assert cache.pools[0].num_used == 2
    table = blocks.tables[0]
    assert [each.pages_needed(1) for each in (blocks, *forks)] == [1] * 4
    for each in forks:
        each.append(1)
    assert blocks.pages_needed(1) == 0, "the last holder writes where it is"
    blocks.append(1)
    assert blocks.tables[0] == table
    pages = {each.tables[0][1] for each in (blocks, *forks)}
    assert len(pages) == 4
    assert [copy.src for copy in cache.take_copies()] == [table[1]] * 3
    assert cache.statistics.copied_pages == 3
    cache.check()


def test_fork_at_the_end_of_a_page_copies_nothing() -> None:
    cache = KvCache(6, 4)
    blocks = cache.sequence()
    blocks.append(8)
    other = blocks.fork()
    other.append(1)
    blocks.append(1)
    assert cache.take_copies() == []
    assert cache.pools[0].num_used == 4


def test_appending_to_a_shared_page_is_all_or_nothing() -> None:
    cache = KvCache(2, 4)
    blocks = cache.sequence()
    blocks.append(6)
    other = blocks.fork()
    with pytest.raises(OutOfPagesError, match="1 KV pages are needed; 0 of 2 are free"):
        other.append(1)
    assert other.tables == blocks.tables
    assert cache.take_copies() == []
    other.release()
    blocks.append(1)


def test_least_recently_used_leaves_go_first_and_from_their_end() -> None:
    cache = KvCache(6, 2, min_shared_tokens=1)
    system, one, two = [9, 9], [1, 1, 1, 1], [2, 2, 2, 2]
    for tail in (one, two):
        run(cache, system + tail).release()
    run(cache, system + one).release()  # used again: the other is the oldest now
    left = {}
    for taken in range(1, 7):
        other = cache.sequence()
        other.append(2 * taken)
        left[taken] = [cache.match([*system, *tail, 0]) for tail in (one, two)]
        other.release()
    assert left == {1: [6, 6], 2: [6, 4], 3: [6, 2], 4: [4, 2], 5: [2, 2], 6: [0, 0]}


def test_pinned_prefixes_stay() -> None:
    cache = KvCache(4, 2)
    run(cache, [1, 2, 3, 4, 5]).release()
    assert cache.pin([1, 2, 3]) == 2
    assert cache.pin([1, 2, 3, 4]) == 4
    assert cache.pin([1, 2, 3, 4]) == 4
    assert cache.pages_pinned == 2
    assert cache.pages_available == 2
    blocks = cache.sequence()
    with pytest.raises(OutOfPagesError, match="2 of 4 are free"):
        blocks.append(5)
    blocks.append(4)
    assert cache.match([1, 2, 3, 4, 5]) == 4
    cache.unpin([1, 2, 3, 4])
    assert cache.pages_available == 0
    cache.unpin([1, 2, 3, 4])
    assert (cache.pages_available, cache.pages_pinned) == (1, 1)
    with pytest.raises(ValueError, match="prefix of 4 tokens is not pinned"):
        cache.unpin([1, 2, 3, 4])
    cache.unpin([1, 2, 3])
    assert cache.pages_pinned == 0


def test_pages_leave_a_window_and_a_match_needs_those_in_it() -> None:
    cache = KvCache(8, 2, (None, 4))
    tokens = list(range(12))
    blocks = run(cache, tokens)
    blocks.release_window(12)
    assert blocks.tables[1][:4] == (-1,) * 4, "token 12 sees 9 to 12"
    assert min(blocks.tables[0]) >= 0
    assert [pool.num_free for pool in cache.pools] == [2, 2], "the tree still has them"
    assert cache.match([*tokens, 0]) == 12
    # Others need pages: in the group with a window, those that left it go first.
    cache.pools[1].allocate(2)
    other = cache.sequence()
    other.append(4)
    assert cache.match([*tokens, 0]) == 12
    assert cache.match(tokens[:8]) == 7
    assert cache.match(tokens[:5]) == 0, "its window is gone"
    adopted = cache.sequence()
    assert cache.adopt(adopted, [*tokens, 0]) == 12
    assert adopted.tables == blocks.tables
    with pytest.raises(ValueError, match="8 have left a window"):
        adopted.truncate(7)
    with pytest.raises(ValueError, match="left its window"):
        adopted.slots(7, 2)
    check_tree(cache._tree, cache._store)


def test_a_page_missing_in_a_window_is_put_back_by_who_computes_it_again() -> None:
    cache = KvCache(3, 2, (None, 4))
    run(cache, list(range(6))).release()
    hog = cache.sequence()
    hog.append(2)
    hog.release()
    assert cache.match([*range(6), 0]) == 4
    run(cache, list(range(6))).release()
    assert cache.match([*range(6), 0]) == 6
    cache.check()


def test_what_was_decided_earlier_is_copied_first() -> None:
    """A page that is freed and used again before the copies are made still gives what it held."""
    cache = KvCache(4, 2)
    memory = {page: f"old {page}" for page in range(4)}
    first = cache.sequence()
    first.append(1)
    second = first.fork()
    second.append(1)  # copies first's page
    third = second.fork()
    (held,) = second.tables[0]
    third.append(1)  # copies the copy
    first.release()
    fourth = third.fork()
    fourth.append(1)
    for group, src, dst in cache.take_copies():
        assert group == 0
        memory[dst] = memory[src]
    assert {memory[each.tables[0][0]] for each in (second, third, fourth)} == {"old 0"}
    assert held == second.tables[0][0]


def test_statistics_count_tokens_and_pages() -> None:
    cache = KvCache(16, 4)
    system = list(range(100, 110))
    chats = [run(cache, [*system, chat, chat, chat]) for chat in range(3)]
    statistics = cache.statistics
    assert (statistics.lookups, statistics.asked_tokens, statistics.hit_tokens) == (3, 39, 20)
    assert statistics.hit_rate == 20 / 39
    assert statistics.taken_pages == 4
    assert statistics.copied_pages == 2
    assert statistics.shared_pages == 2
    assert statistics.cached_pages == 2 + 3
    assert statistics.idle_pages == statistics.evicted_pages == 0
    for chat in chats:
        chat.release()
    assert cache.statistics.idle_pages == 5
    cache.sequence().append(64)
    assert cache.statistics.evicted_pages == 5
    assert KvCache(1, 1).statistics.hit_rate == 0.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: KvCache(4, 0), "page_size is 0"),
        (lambda: KvCache(0, 4), "num_blocks is 0"),
        (lambda: KvCache(4, 4, ()), "windows is"),
        (lambda: KvCache(4, 4, (None, 0)), r"windows is \[None, 0\]"),
        (lambda: KvCache(4, 4, min_shared_tokens=0), "min_shared_tokens is 0"),
        (lambda: run(KvCache(4, 4), [1, 2]).append(-1), "cannot append -1"),
        (lambda: run(KvCache(4, 4), [1, 2]).truncate(3), "cannot truncate 2 tokens to 3"),
        (lambda: run(KvCache(4, 4), [1, 2]).release_window(3), "3 tokens cannot be computed"),
        (lambda: adopt_twice(), "2 tokens already"),
        (lambda: insert_too_much(), "5 tokens cannot be computed: of 3, 3 have pages"),
    ],
)
def test_mistakes_are_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def adopt_twice() -> None:
    cache = KvCache(4, 4)
    cache.adopt(run(cache, [1, 2]), [1, 2])


def insert_too_much() -> None:
    cache = KvCache(4, 4)
    cache.insert(run(cache, [1, 2, 3]), [1, 2, 3], 5)


@contextmanager
def counted_lines() -> Iterator[list[int]]:
    """Lines of Python that run in kvcache/: steps, which no load on the machine changes."""
    count = [0]

    def on_line(frame: FrameType, event: str, _: Any) -> Any:
        count[0] += event == "line"
        return on_line

    def on_call(frame: FrameType, event: str, _: Any) -> Any:
        return on_line if "kvcache" in frame.f_code.co_filename else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield count
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("windows", [(None,), (None, 8), (8,)])
def test_no_operation_looks_at_the_whole_tree_or_pool(windows: tuple[int | None, ...]) -> None:
    """Each costs the same beside 30 other prefixes as beside 3,000."""

    def steps(prefixes: int) -> dict[str, int]:
        cache = KvCache(8 * prefixes + 12, 4, windows)
        for number in range(prefixes):
            run(cache, [number % 7, number, *[number] * 30]).release()
        hog, other = cache.sequence(), cache.sequence()
        hog.append(4 * cache.pools[0].num_free)  # from now on, pages come from eviction
        tokens = [prefixes - 1] * 2 + [prefixes - 1] * 40
        tokens[0] = (prefixes - 1) % 7
        blocks = cache.sequence()
        operations: dict[str, Callable[[], Any]] = {
            "match": lambda: cache.match(tokens),
            "fits": lambda: cache.fits(tokens, 50),
            "adopt": lambda: cache.adopt(blocks, tokens),
            "append": lambda: blocks.append(12),
            "insert": lambda: cache.insert(blocks, tokens, len(tokens)),
            "fork": lambda: blocks.fork().release(),
            "extend": lambda: cache.extend(blocks, tokens, 40),
            "pin": lambda: cache.pin(tokens),
            "unpin": lambda: cache.unpin(tokens),
            "release_window": lambda: blocks.release_window(blocks.num_tokens),
            "release": lambda: blocks.release(),
            "evict": lambda: other.append(24),
            "statistics": lambda: cache.statistics,
            "available": lambda: cache.pages_available,
        }
        counts = {}
        for name, operation in operations.items():
            with counted_lines() as count:
                operation()
            counts[name] = count[0]
        cache.check()
        return counts

    few, many = steps(30), steps(3000)
    assert few == many
    assert min(many.values()) > 0
