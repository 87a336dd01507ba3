"""`KvCache`: the pages of all sequences, and those kept for prefixes that may come again."""

from collections import Counter
from collections.abc import Sequence

from ..records import dataclass
from .block_pool import BlockPool
from .invariants import check_store, check_tree
from .page_store import PageCopy, PageStore
from .prefix_tree import Match, PrefixTree
from .sequence_blocks import SequenceBlocks, pages_for


@dataclass(frozen=True)
class PrefixStatistics:
    """What sharing has done. Counts of pages are of all window groups together."""

    lookups: int  # sequences that asked for a prefix
    asked_tokens: int  # tokens they had
    hit_tokens: int  # tokens that need not be computed, those of copied pages included
    taken_pages: int  # pages taken over from the tree
    copied_pages: int  # pages copied, for a prefix's last tokens or on write
    evicted_pages: int
    cached_pages: int  # in the tree now
    idle_pages: int  # of these, those that no sequence holds
    shared_pages: int  # held by two sequences or more now, a pinned prefix being one
    pinned_pages: int

    @property
    def hit_rate(self) -> float:
        """The share of asked tokens that were there; 0 before any were asked for."""
        return self.hit_tokens / self.asked_tokens if self.asked_tokens else 0.0


class KvCache:
    """Keeps count of an executor's cache: `num_blocks` pages of `page_size` tokens in each group of layers
    that share a window, `windows` being those in tokens, None for full attention, in the executor's order.

    A sequence's tokens are the same as without sharing, whatever is taken over: pages hold exactly the tokens
    asked for. `share_prefixes` turns the prefix tree off; matches that save under `min_shared_tokens` tokens
    (a page by default) are not used. Not safe to use from several threads at once.
    """

    def __init__(
        self,
        num_blocks: int,
        page_size: int,
        windows: Sequence[int | None] = (None,),
        *,
        share_prefixes: bool = True,
        min_shared_tokens: int | None = None,
    ) -> None:
        if page_size < 1:
            raise ValueError(f"page_size is {page_size}; expected at least 1 token")
        if not windows or any(w is not None and w < 1 for w in windows):
            raise ValueError(f"windows is {list(windows)}; expected None or at least 1 token for each group")
        if min_shared_tokens is not None and min_shared_tokens < 1:
            raise ValueError(f"min_shared_tokens is {min_shared_tokens}; expected at least 1")
        self._page_size, self._windows = page_size, tuple(windows)
        self._share = share_prefixes
        self._min_shared = page_size if min_shared_tokens is None else min_shared_tokens
        self._store = PageStore(len(self._windows), num_blocks)
        self._tree = PrefixTree(self._store, page_size, self._windows)
        self._pins: dict[tuple[int, ...], list[SequenceBlocks]] = {}
        self._pinned: tuple[Counter[int], ...] = tuple(Counter() for _ in self._windows)
        self._lookups = self._asked = self._hit = self._taken = 0

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self._page_size

    @property
    def num_blocks(self) -> int:
        """Pages of each group."""
        return self._store.pools[0].num_blocks

    @property
    def num_groups(self) -> int:
        """G: groups of layers that share a window."""
        return len(self._windows)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each group in tokens; None sees everything."""
        return self._windows

    @property
    def shares_prefixes(self) -> bool:
        return self._share

    @property
    def pools(self) -> tuple[BlockPool, ...]:
        """The pool of each group."""
        return self._store.pools

    @property
    def pages_available(self) -> int:
        """Pages that can be allocated now in the scarcest group: free ones, and those that only the prefix
        tree holds."""
        return self._store.num_available

    @property
    def pages_pinned(self) -> int:
        """Pages that pinned prefixes keep, in the group that has most."""
        return max(map(len, self._pinned))

    @property
    def statistics(self) -> PrefixStatistics:
        """As things are now."""
        store = self._store
        return PrefixStatistics(
            lookups=self._lookups,
            asked_tokens=self._asked,
            hit_tokens=self._hit,
            taken_pages=self._taken,
            copied_pages=store.num_copied,
            evicted_pages=self._tree.num_evicted,
            cached_pages=store.num_cached,
            idle_pages=sum(map(len, store.idle)),
            shared_pages=store.num_shared,
            pinned_pages=sum(map(len, self._pinned)),
        )

    def sequence(self) -> SequenceBlocks:
        """An empty table."""
        return SequenceBlocks(self._store, self._page_size, self._windows, self._tree.root)

    def match(self, tokens: Sequence[int]) -> int:
        """How many leading tokens `adopt` would find now. Changes nothing."""
        match = self._find(tokens)
        return match.num_tokens if match.num_tokens >= self._min_shared else 0

    def fits(self, tokens: Sequence[int], count: int) -> bool:
        """Whether there are pages now for a new sequence of `count` tokens that begins with `tokens` and
        adopts what is there of them. Changes nothing."""
        match = self._find(tokens)
        pages = pages_for(count, self._page_size)
        if match.num_tokens < self._min_shared:
            return pages <= self.pages_available
        return self._has_room(match, pages - len(match.pages[0]))

    def adopt(self, blocks: SequenceBlocks, tokens: Sequence[int]) -> int:
        """Fills an empty table with the pages of the longest usable match: full ones shared, the next one,
        where it agrees in part, copied if there is a page for the copy. Returns the number of tokens that are
        computed by that: never all of them, since the last one gives the next. `take_copies` afterwards."""
        if blocks.num_tokens:
            raise ValueError(f"the sequence has {blocks.num_tokens} tokens already; expected an empty one")
        self._lookups += 1
        self._asked += len(tokens)
        return self._take_over(blocks, tokens, 0)

    def extend(self, blocks: SequenceBlocks, tokens: Sequence[int], computed: int) -> int:
        """A sequence in the middle of its prompt takes over what others have computed of it meanwhile, in
        place of any room that it has for these tokens. Returns the number of tokens that are computed now;
        `computed` itself unless that is at the end of a page. `take_copies` afterwards."""
        if computed == 0 or computed % self._page_size or computed >= len(tokens):
            return computed
        self.insert(blocks, tokens, computed)
        if blocks._place()[1] * self._page_size != computed:
            return computed
        return self._take_over(blocks, tokens, computed)

    def insert(self, blocks: SequenceBlocks, tokens: Sequence[int], computed: int) -> None:
        """The full pages of `tokens[:computed]`, which `blocks` holds computed, enter the prefix tree. They
        stay the sequence's too; where the tree has one already, the sequence takes that and frees its own.
        Looks only at pages after those that it inserted or took over before."""
        if not 0 <= computed <= min(len(tokens), blocks.num_tokens):
            raise ValueError(
                f"{computed} tokens cannot be computed: of {len(tokens)}, {blocks.num_tokens} have pages"
            )
        stop = computed // self._page_size
        if self._share and stop > blocks._depth:
            node, depth = blocks._place()
            blocks._move(self._tree.insert(tokens, blocks._tables, node, depth, stop), stop)

    def share(self, blocks: SequenceBlocks, tokens: Sequence[int]) -> int:
        """Fills an empty table with what the tree has of `tokens`, all of them perhaps, in full pages: for
        pages that are moved, where `adopt` is for tokens that run. Returns how many tokens that is."""
        if blocks.num_tokens:
            raise ValueError(f"the sequence has {blocks.num_tokens} tokens already; expected an empty one")
        blocks._take(self._tree.match(tokens, len(tokens), self._tree.root, 0, blocks._released, copy=False))
        return blocks.num_tokens

    def pin(self, tokens: Sequence[int]) -> int:
        """Keeps what is there of a prefix, in full pages, until it is unpinned as often as it was pinned.
        Returns how many tokens that is. Other sequences must do without these pages (`pages_pinned`)."""
        blocks = self.sequence()
        self.share(blocks, tokens)
        self._pins.setdefault(tuple(tokens), []).append(blocks)
        for pinned, table in zip(self._pinned, blocks.tables, strict=True):
            pinned.update(page for page in table if page >= 0)
        return blocks.num_tokens

    def unpin(self, tokens: Sequence[int]) -> None:
        """Takes back one `pin` of the same tokens. Raises `ValueError` where there is none."""
        key = tuple(tokens)
        if key not in self._pins:
            raise ValueError(f"a prefix of {len(key)} tokens is not pinned and cannot be unpinned")
        blocks = self._pins[key].pop()
        if not self._pins[key]:
            del self._pins[key]
        for pinned, table in zip(self._pinned, blocks.tables, strict=True):
            for page in table:
                if page >= 0:
                    pinned[page] -= 1
                    if pinned[page] == 0:
                        del pinned[page]
        blocks.release()

    def take_copies(self) -> list[PageCopy]:
        """The copies that the executor must make, one after the other, before its cache is read or written
        in any other way; there are none afterwards."""
        copies, self._store.copies = self._store.copies, []
        return copies

    @property
    def has_copies(self) -> bool:
        """Whether there are copies to be made."""
        return bool(self._store.copies)

    def check(self) -> None:
        """Raises `AssertionError` where an invariant is broken. Looks at everything: for tests."""
        check_store(self._store)
        check_tree(self._tree, self._store)

    def _find(self, tokens: Sequence[int]) -> Match:
        return self._tree.match(tokens, len(tokens) - 1, self._tree.root, 0, [0] * self.num_groups)

    def _take_over(self, blocks: SequenceBlocks, tokens: Sequence[int], computed: int) -> int:
        blocks.truncate(computed)
        node, depth = blocks._place()
        match = self._tree.match(tokens, len(tokens) - 1, node, depth, blocks._released)
        if match.partial is not None and not self._has_room(match, 1):
            match = self._tree.match(tokens, len(tokens) - 1, node, depth, blocks._released, copy=False)
        if match.num_tokens - computed < self._min_shared:
            return computed
        blocks._take(match)
        if match.partial is not None:
            self._store.touch(match.partial)
            blocks._take_copy(match.partial, match.num_tokens)
        self._taken += sum(page >= 0 for pages in match.pages for page in pages)
        self._hit += match.num_tokens - computed
        return match.num_tokens

    def _has_room(self, match: Match, count: int) -> bool:
        """Whether `count` pages of each group can be allocated once the match's pages are held."""
        return all(
            count + sum(page in idle for page in pages) <= self._store.available(group)
            for group, (pages, idle) in enumerate(zip(match.pages, self._store.idle, strict=True))
        )
