"""The whole cache under random traffic, beside memory that remembers what was written where.

Prefixes are alike and of two tokens, so they collide; pools are tiny, so pages are evicted. What a slot
holds is the whole prefix up to its token: if a sequence ever read another's keys, or some that are stale, the
prefixes would differ.
"""

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nybble.kvcache import KvCache, OutOfPagesError, SequenceBlocks, pages_for

BASE = [0, 1, 1, 0, 1, 0, 0, 0, 1, 1, 0, 1, 1, 1]
# Most begin as others do, and end in their own way.
TOKENS = st.builds(
    lambda count, tail: BASE[:count] + tail,
    st.integers(0, len(BASE)),
    st.lists(st.integers(0, 1), max_size=4),
)
GROUPS = [(None,), (None,), (None, 3), (4, None), (3,), (1,), (None, 5, 1), (2, 6)]


@dataclass(eq=False)
class Running:
    """A sequence: all its tokens, and how many are in the cache."""

    blocks: SequenceBlocks
    tokens: list[int]
    computed: int = 0
    released: int = field(default=0)  # `computed` at the last release_window


class CacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.running: list[Running] = []
        self.pinned: list[tuple[int, ...]] = []

    @initialize(
        windows=st.sampled_from(GROUPS),
        page_size=st.integers(1, 3),
        num_blocks=st.integers(3, 9),
        min_shared=st.integers(1, 4),
    )
    def begin(
        self, windows: tuple[int | None, ...], page_size: int, num_blocks: int, min_shared: int
    ) -> None:
        self.cache = KvCache(num_blocks, page_size, windows, min_shared_tokens=min_shared)
        self.memory: list[dict[int, tuple[int, ...]]] = [{} for _ in windows]  # of each group, slot to prefix

    # What the executor does.

    def make_copies(self) -> None:
        size = self.cache.page_size
        for group, src, dst in self.cache.take_copies():
            memory = self.memory[group]
            for offset in range(size):
                memory[dst * size + offset] = memory.get(src * size + offset, ())

    def write(self, each: Running, count: int) -> None:
        """A step of `count` tokens, which have room."""
        self.make_copies()
        slots = each.blocks.slots(each.computed, count)
        for group, of_group in enumerate(slots):
            for position, slot in enumerate(of_group, each.computed):
                page = slot // self.cache.page_size
                assert self.cache.pools[group].references(page) == 1, "a shared page is written"
                self.memory[group][slot] = tuple(each.tokens[: position + 1])
        each.computed += count

    def assert_readable(self, each: Running) -> None:
        """The next token of a sequence reads its own keys and values."""
        size = self.cache.page_size
        for group, (window, table) in enumerate(zip(self.cache.windows, each.blocks.tables, strict=True)):
            first = 0 if window is None else max(0, each.computed - window + 1)
            for position in range(first, each.computed):
                slot = table[position // size] * size + position % size
                assert slot >= 0
                assert self.memory[group][slot] == tuple(each.tokens[: position + 1])

    def matches(self, tokens: list[int]) -> tuple[int, int]:
        """By trying every length: the longest match in full pages, and the longest of all. The tree is taken
        as a dictionary from the tokens before a page's end to that page in each group."""
        size, windows = self.cache.page_size, self.cache.windows
        held: dict[tuple[int, ...], tuple[int, ...]] = {}
        stack = [(self.cache._tree.root, ())]
        while stack:
            node, prefix = stack.pop()
            for index, pages in enumerate(zip(*node.pages, strict=True)):
                prefix = (*prefix, *node.tokens[index * size : (index + 1) * size])
                held[prefix] = pages
                for group, page in enumerate(pages):
                    slots = range(page * size, (page + 1) * size)
                    assert page < 0 or self.memory[group][slots[-1]] == prefix
            stack += [(child, prefix) for child in node.children.values()]

        def there(begin: tuple[int, ...], length: int) -> bool:
            """Whether the pages of `begin` give its first tokens, as far as the next one sees them."""
            return all(
                held[begin[: end * size]][group] >= 0
                for group, window in enumerate(windows)
                for end in range(1, len(begin) // size + 1)
                if window is None or end * size > max(0, length - window + 1)
            )

        full = most = 0
        for length in range(1, len(tokens)):
            want = tuple(tokens[:length])
            for begin in held:
                if (
                    len(begin) == -(-length // size) * size
                    and begin[:length] == want
                    and there(begin, length)
                ):
                    most = length
                    full = length if length % size == 0 else full
        return full, most

    # What the scheduler does.

    @rule(tokens=TOKENS)
    def match(self, tokens: list[int]) -> None:
        full, most = self.matches(tokens)
        found = self.cache.match(tokens)
        if most < self.cache._min_shared:
            assert found == 0
        elif self.cache.windows == (None,):
            assert found == most
        else:  # the page that is copied is the one that agrees longest, if it is there in all groups
            assert (full if full >= self.cache._min_shared else 0) <= found <= most

    @rule(tokens=TOKENS, run=st.booleans(), ends=st.booleans())
    def start(self, tokens: list[int], run: bool, ends: bool) -> None:
        """A sequence that others may share with; it may be computed at once, and it may end then."""
        expected = self.cache.match(tokens)
        each = Running(self.cache.sequence(), tokens)
        copies = any(self.cache.pools[g].num_free == 0 for g in range(self.cache.num_groups))
        each.computed = self.cache.adopt(each.blocks, tokens)
        assert each.computed == each.blocks.num_tokens
        assert each.computed == expected or (copies and each.computed < expected)
        assert each.computed < max(1, len(tokens))
        each.released = each.computed
        self.running.append(each)
        self.make_copies()
        self.assert_readable(each)
        missing = len(tokens) - each.computed
        if run and each.blocks.pages_needed(missing) <= self.cache.pages_available:
            each.blocks.append(missing)
            self.write(each, missing)
            self.cache.insert(each.blocks, tokens, each.computed)
            self.assert_readable(each)
            if ends:
                self.running.remove(each)
                each.blocks.release()

    @rule(tokens=TOKENS, more=st.integers(0, 9))
    def start_where_it_fits(self, tokens: list[int], more: int) -> None:
        count = len(tokens) + more
        fits = self.cache.fits(tokens, count)
        blocks = self.cache.sequence()
        computed = self.cache.adopt(blocks, tokens)
        try:
            blocks.append(count - computed)
        except OutOfPagesError:
            assert not fits
        else:
            assert fits
        blocks.release()

    @precondition(lambda self: self.running)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), max_size=5), room=st.integers(0, 3))
    def advance(self, data: st.DataObject, more: list[int], room: int) -> None:
        """Some of the tokens are computed, after some new ones came; pages may be reserved in advance."""
        each = data.draw(st.sampled_from(self.running))
        each.tokens += more
        count = data.draw(st.integers(0, min(5, len(each.tokens) - each.computed)))
        missing = max(0, each.computed + count - each.blocks.num_tokens) + (room if count else 0)
        needed, before = each.blocks.pages_needed(missing), each.blocks.tables
        tokens = each.blocks.num_tokens
        if needed > self.cache.pages_available:
            # In groups that lack nothing there may be enough; the sum is what one group needs at most.
            try:
                each.blocks.append(missing)
            except OutOfPagesError:
                assert (each.blocks.tables, each.blocks.num_tokens) == (before, tokens)
                return
        else:
            each.blocks.append(missing)
        self.write(each, count)
        self.assert_readable(each)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def insert(self, data: st.DataObject) -> None:
        each = data.draw(st.sampled_from(self.running))
        self.cache.insert(each.blocks, each.tokens, each.computed)
        self.make_copies()
        self.assert_readable(each)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=TOKENS)
    def extend(self, data: st.DataObject, tokens: list[int]) -> None:
        """What the sequence will compute next is compared with what others have computed."""
        each = data.draw(st.sampled_from(self.running))
        each.tokens += tokens
        computed = self.cache.extend(each.blocks, each.tokens, each.computed)
        assert computed >= each.computed
        if computed > each.computed:
            assert computed == each.blocks.num_tokens < len(each.tokens)
            each.computed = each.released = computed
        self.make_copies()
        self.assert_readable(each)

    @precondition(lambda self: self.running and len(self.running) < 6)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        each = data.draw(st.sampled_from(self.running))
        each.blocks.truncate(each.computed)
        other = Running(each.blocks.fork(), list(each.tokens), each.computed, each.released)
        assert other.blocks.tables == each.blocks.tables
        self.running.append(other)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), max_size=3))
    def truncate(self, data: st.DataObject, more: list[int]) -> None:
        """Tokens are rejected, and others take their place."""
        each = data.draw(st.sampled_from(self.running))
        count = data.draw(st.integers(0, each.computed))
        size = self.cache.page_size
        gone = any(
            w is not None and max(0, count - w + 1) // size < max(0, each.released - w + 1) // size
            for w in self.cache.windows
        )
        if gone and count < each.blocks.num_tokens:
            with pytest.raises(ValueError, match="have left a window"):
                each.blocks.truncate(count)
            return
        each.blocks.truncate(count)
        each.computed = count
        del each.tokens[count:]
        each.tokens += more
        self.assert_readable(each)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def release_window(self, data: st.DataObject) -> None:
        each = data.draw(st.sampled_from(self.running))
        each.blocks.release_window(each.computed)
        each.released = max(each.released, each.computed)
        self.assert_readable(each)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        each = data.draw(st.sampled_from(self.running))
        self.running.remove(each)
        each.blocks.release()
        assert each.blocks.num_tokens == each.blocks.num_pages == 0

    @rule(tokens=TOKENS)
    def pin(self, tokens: list[int]) -> None:
        there = self.cache.pin(tokens)
        assert there % self.cache.page_size == 0
        assert there <= len(tokens)
        self.pinned.append(tuple(tokens))
        # As long as it is pinned, it is found.
        self.promised = (tuple(tokens), there)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        tokens = data.draw(st.sampled_from(self.pinned))
        self.pinned.remove(tokens)
        self.cache.unpin(tokens)

    @rule()
    def every_page_that_is_said_to_be_available_is(self) -> None:
        count, size = self.cache.pages_available, self.cache.page_size
        blocks = self.cache.sequence()
        with pytest.raises(OutOfPagesError, match=f"{count + 1} KV pages are needed; {count} of"):
            blocks.append(count * size + 1)
        blocks.append(count * size)
        assert self.cache.pages_available == 0
        blocks.release()

    @invariant()
    def everything_adds_up(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        for each in self.running:
            size = self.cache.page_size
            pages = pages_for(each.blocks.num_tokens, size)
            for window, table in zip(self.cache.windows, each.blocks.tables, strict=True):
                assert len(table) == pages
                gone = 0 if window is None else max(0, each.released - window + 1) // size
                assert table[:gone] == (-1,) * gone
                assert min(table[gone:], default=0) >= 0
        statistics = self.cache.statistics
        held = [
            {page for each in self.running for page in each.blocks.tables[g] if page >= 0}
            for g in range(self.cache.num_groups)
        ]
        free = sum(pool.num_free for pool in self.cache.pools)
        assert statistics.hit_tokens <= max(1, statistics.asked_tokens) * 100
        assert statistics.idle_pages <= statistics.cached_pages
        if not self.pinned:
            assert statistics.pinned_pages == self.cache.pages_pinned == 0
            assert (
                free + statistics.idle_pages + sum(map(len, held))
                == self.cache.num_blocks * self.cache.num_groups
            )

    def teardown(self) -> None:
        """When all has ended, each page is free or in the tree, with no other reference."""
        if not hasattr(self, "cache"):
            return
        for each in self.running:
            each.blocks.release()
        for tokens in self.pinned:
            self.cache.unpin(tokens)
        self.cache.check()
        assert self.cache.pages_available == self.cache.num_blocks
        statistics = self.cache.statistics
        assert statistics.cached_pages == statistics.idle_pages
        assert statistics.shared_pages == statistics.pinned_pages == 0


TestCache = CacheMachine.TestCase
TestCache.settings = settings(
    max_examples=250,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
