"""`SequenceBlocks`: the pages of one sequence."""

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .page_store import PageStore
from .prefix_node import PrefixNode
from .prefix_tree import Match, first_visible


def pages_for(tokens: int, page_size: int) -> int:
    """How many pages hold that many tokens."""
    return -(-tokens // page_size)


def block_table(sequences: Sequence["SequenceBlocks"]) -> NDArray[np.int32]:
    """Tables of sequences of one cache as one array, [G, sequences, most pages] int32, which is not
    writable: -1 where there is no page."""
    groups, width = sequences[0].num_groups, max(blocks.num_pages for blocks in sequences)
    # Bytes joined at once: row after row into an array takes several times as long.
    rows = [
        blocks._tables[group].tobytes().ljust(4 * width, b"\xff")
        for group in range(groups)
        for blocks in sequences
    ]
    return np.frombuffer(b"".join(rows), np.int32).reshape(groups, len(sequences), width)


class SequenceBlocks:
    """A sequence's block table, one row for each window group: token t of group g lives in page
    `table[g][t // page_size]`, at offset `t % page_size`. Made by `KvCache.sequence`.

    Each group has a pool of its own, because page p of one group's layers and page p of another's are
    different memory. Groups grow together; pages that have left a group's window can be given back in that
    group alone, and are −1 in its table.

    Pages may be shared with other sequences and with the prefix tree. Whoever appends to a page that is
    shared gets a copy of it, so what is written is never another's.
    """

    def __init__(
        self, store: PageStore, page_size: int, windows: Sequence[int | None], root: PrefixNode
    ) -> None:
        self._store = store
        self._page_size = page_size
        self._windows = tuple(windows)
        self._root = root
        # Arrays of int32, which numpy copies whole.
        self._tables = tuple(array("i") for _ in windows)
        self._num_tokens = 0
        self._released = [0] * len(self._tables)  # pages at the beginning that have left the window
        # Whether the last page, where it has room left, is known to be this sequence's alone.
        self._writable = True
        # Where it is in the prefix tree: page depth - 1 is in `node`, unless depth is 0.
        self._node, self._depth = root, 0
        store.tables.add(self)

    @property
    def num_tokens(self) -> int:
        """Tokens there is room kept for."""
        return self._num_tokens

    @property
    def num_groups(self) -> int:
        """G: groups of layers that share a window."""
        return len(self._tables)

    @property
    def num_pages(self) -> int:
        """Length of each group's table: the pages of all its tokens, those that left a window included."""
        return len(self._tables[0])

    @property
    def tables(self) -> tuple[tuple[int, ...], ...]:
        """The pages of each group in the order of their tokens, [G][num_pages]; −1 where one has left the
        window."""
        return tuple(tuple(table) for table in self._tables)

    @property
    def writable_pages(self) -> tuple[int, ...] | None:
        """Of each group the last page, where it has room left and may be written without a copy; else None.
        It is no other sequence's."""
        if not self._writable or self._num_tokens == self.num_pages * self._page_size:
            return None
        return tuple(table[-1] for table in self._tables)

    def pages_needed(self, count: int) -> int:
        """New pages, in the group that needs most, that `append(count)` would take."""
        if count == 0:
            return 0
        if self._writable:
            return self._pages_beyond(count)
        return max(self._new_pages(count))

    def append(self, count: int) -> None:
        """Makes room for `count` more tokens, evicting what only the prefix tree holds where pages are
        needed. A last page that others hold too is replaced by a copy, to be made before it is written
        (`KvCache.take_copies`). All or nothing over the groups: raises `OutOfPagesError` and changes nothing
        when a group has too few pages."""
        if count < 0:
            raise ValueError(f"cannot append {count} tokens")
        total = self._num_tokens + count
        if count and not (self._writable and total <= len(self._tables[0]) * self._page_size):
            self._grow(count)
        self._num_tokens = total

    def _grow(self, count: int) -> None:
        counts = self._new_pages(count)
        pages = self._pages_beyond(count)
        fresh = self._store.allocate(counts)
        for group, (table, new) in enumerate(zip(self._tables, fresh, strict=True)):
            if len(new) > pages:
                shared, copy = table[-1], new.pop(0)
                self._store.copy(group, shared, copy)
                table[-1] = copy
                self._store.drop(group, (shared,))
            table.extend(new)
        self._writable = True

    def _pages_beyond(self, count: int) -> int:
        return pages_for(self._num_tokens + count, self._page_size) - self.num_pages

    def _new_pages(self, count: int) -> list[int]:
        """Of each group, with one for a copy where the page that is written first is shared."""
        pages = self._pages_beyond(count)
        if self._writable or self._num_tokens % self._page_size == 0:
            return [pages] * len(self._tables)
        pools = self._store.pools
        return [
            pages + (pool.references(table[-1]) > 1) for pool, table in zip(pools, self._tables, strict=True)
        ]

    def fork(self) -> "SequenceBlocks":
        """A sequence with the same tokens in the same pages. Whichever appends first to a last page with room
        left gets a copy. All tokens that have room must be computed: give up the rest by `truncate`."""
        other = SequenceBlocks(self._store, self._page_size, self._windows, self._root)
        for group, (table, theirs) in enumerate(zip(self._tables, other._tables, strict=True)):
            self._store.hold(group, table)
            theirs.extend(table)
        other._num_tokens, other._released = self._num_tokens, list(self._released)
        other._node, other._depth = self._node, self._depth
        self._writable = other._writable = False
        return other

    def truncate(self, num_tokens: int) -> None:
        """Gives back the room after the first `num_tokens` tokens, such as that of draft tokens which were
        rejected. Raises `ValueError` where the next token would see pages that left a window."""
        if not 0 <= num_tokens <= self._num_tokens:
            raise ValueError(f"cannot truncate {self._num_tokens} tokens to {num_tokens}")
        if num_tokens == self._num_tokens:
            return
        size = self._page_size
        for window, released in zip(self._windows, self._released, strict=True):
            if first_visible(window, num_tokens) // size < released:
                raise ValueError(
                    f"cannot truncate to {num_tokens} tokens: {released * size} have left a window"
                )
        self._move(self._node, min(self._depth, num_tokens // size))
        pages = pages_for(num_tokens, size)
        for group, table in enumerate(self._tables):
            self._store.drop_table(group, table[pages:])
            del table[pages:]
        self._num_tokens = num_tokens
        self._writable = False

    def release_window(self, computed: int) -> None:
        """Gives back, in groups with a window, the pages that no token after the first `computed` sees."""
        if not 0 <= computed <= self._num_tokens:
            raise ValueError(f"{computed} tokens cannot be computed: {self._num_tokens} have pages")
        for group, window in enumerate(self._windows):
            if window is None or computed < window:
                continue
            table, begin = self._tables[group], self._released[group]
            end = first_visible(window, computed) // self._page_size
            if end > begin:
                self._store.drop(group, table[begin:end])
                table[begin:end] = array("i", [-1]) * (end - begin)
                self._released[group] = end

    def release(self) -> None:
        """Gives every page back. The sequence is empty afterwards and may grow again."""
        for group, table in enumerate(self._tables):
            self._store.drop_table(group, table)
            del table[:]
        self._num_tokens = 0
        self._released = [0] * len(self._tables)
        self._writable = True
        self._move(self._root, 0)

    def slots(self, start: int, count: int) -> list[list[int]]:
        """Flat cache slots, `page * page_size + offset`, of `count` tokens from `start`: [G][count]."""
        if start < 0 or count < 0 or start + count > self._num_tokens:
            raise ValueError(
                f"tokens {start} to {start + count} are outside the {self._num_tokens} that have pages"
            )
        size, positions = self._page_size, range(start, start + count)
        if count and start < max(self._released) * size:
            raise ValueError(f"token {start} is in a page that has left its window")
        return [[table[t // size] * size + t % size for t in positions] for table in self._tables]

    # What follows is for `KvCache`.

    def _move(self, node: PrefixNode, depth: int) -> None:
        self._node, self._depth = node.upwards(depth), depth

    def _place(self) -> tuple[PrefixNode, int]:
        """Where the sequence is in the tree: a node and the pages up to there. A place of which it holds no
        page may be gone; only a window of one token comes to that."""
        if self._depth and all(table[self._depth - 1] < 0 for table in self._tables):
            self._move(self._root, 0)
        return self._node, self._depth

    def _take(self, match: Match) -> None:
        """Shares the full pages of a match; it begins where the tables end."""
        for group, (table, pages) in enumerate(zip(self._tables, match.pages, strict=True)):
            self._store.hold(group, pages)
            table.extend(pages)
        self._num_tokens = self.num_pages * self._page_size
        self._move(match.node, self.num_pages)
        self.release_window(self._num_tokens)

    def _take_copy(self, pages: Sequence[int], num_tokens: int) -> None:
        """Copies a page of each group behind the last full one, for its first tokens. Raises
        `OutOfPagesError`, and nothing has changed then."""
        fresh = self._store.allocate([1] * len(pages))
        for group, (src, (dst,)) in enumerate(zip(pages, fresh, strict=True)):
            self._store.copy(group, src, dst)
            self._tables[group].append(dst)
        self._num_tokens = num_tokens
        self._writable = True
        self.release_window(num_tokens)
