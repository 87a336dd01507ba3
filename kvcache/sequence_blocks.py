"""`SequenceBlocks`: the pages of one sequence."""

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .block_pool import BlockPool, OutOfPagesError


def pages_for(tokens: int, page_size: int) -> int:
    """How many pages hold that many tokens."""
    return -(-tokens // page_size)


class SequenceBlocks:
    """A sequence's block table, one row for each window group: token t of group g lives in page
    `table[g][t // page_size]`, at offset `t % page_size`.

    Each group has a pool of its own, because page p of one group's layers and page p of another's are
    different memory. Groups grow together.
    """

    def __init__(self, pools: Sequence[BlockPool], page_size: int) -> None:
        if not pools:
            raise ValueError("a sequence needs at least one pool")
        if page_size < 1:
            raise ValueError(f"page_size is {page_size}; expected at least 1 token")
        self._pools = tuple(pools)
        self._page_size = page_size
        # Arrays of int32, which numpy copies whole.
        self._tables = tuple(array("i") for _ in pools)
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Tokens there is room kept for: the sum of all appends."""
        return self._num_tokens

    @property
    def num_groups(self) -> int:
        """G: groups of layers that share a window."""
        return len(self._tables)

    @property
    def num_pages(self) -> int:
        """Pages held in each group."""
        return len(self._tables[0])

    @property
    def tables(self) -> tuple[tuple[int, ...], ...]:
        """The pages of each group in the order of their tokens, [G][num_pages]."""
        return tuple(tuple(table) for table in self._tables)

    def pages_needed(self, count: int) -> int:
        """New pages, in each group, that `append(count)` would take."""
        return pages_for(self._num_tokens + count, self._page_size) - self.num_pages

    def append(self, count: int) -> None:
        """Makes room for `count` more tokens. All or nothing over the groups: raises `OutOfPagesError` and
        changes nothing when a pool has too few free pages."""
        if count < 0:
            raise ValueError(f"cannot append {count} tokens")
        if pages := self.pages_needed(count):
            self._extend(pages)
        self._num_tokens += count

    def slots(self, start: int, count: int) -> list[list[int]]:
        """Flat cache slots, `page * page_size + offset`, of `count` tokens from `start`: [G][count]."""
        if start < 0 or count < 0 or start + count > self._num_tokens:
            raise ValueError(
                f"tokens {start} to {start + count} are outside the {self._num_tokens} that have pages"
            )
        size, positions = self._page_size, range(start, start + count)
        return [[table[t // size] * size + t % size for t in positions] for table in self._tables]

    def write_tables(self, block_table: NDArray[np.int32], row: int) -> None:
        """Writes the tables into `block_table[:, row]`, [G, num_pages or more] int32, and leaves what is
        beyond them."""
        for group, table in enumerate(self._tables):
            block_table[group, row, : len(table)] = table

    def release(self) -> None:
        """Gives every page back. The sequence is empty afterwards and may grow again."""
        for pool, table in zip(self._pools, self._tables, strict=True):
            pool.free(table)
            del table[:]
        self._num_tokens = 0

    def _extend(self, pages: int) -> None:
        for pool in self._pools:
            if pool.num_free < pages:
                raise OutOfPagesError(
                    f"{pages} KV pages are needed; {pool.num_free} of {pool.num_blocks} are free"
                )
        for pool, table in zip(self._pools, self._tables, strict=True):
            table.extend(pool.allocate(pages))
