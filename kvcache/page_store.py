"""`PageStore`: the pools of all window groups, and which of their pages nobody but the prefix tree holds."""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol
from weakref import WeakSet

from .block_pool import BlockPool, OutOfPagesError


class PageCopy(NamedTuple):
    """In the layers of window group `group`, page `dst` becomes what page `src` is then."""

    group: int
    src: int
    dst: int


class HasTables(Protocol):
    """What holds pages: a table of each group."""

    @property
    def tables(self) -> tuple[tuple[int, ...], ...]: ...

    @property
    def writable_pages(self) -> tuple[int, ...] | None: ...


class PageStore:
    """Every page that a sequence's table takes or gives back passes here, so that pages which only the
    prefix tree still holds are known, in the order in which they became so, and can be evicted.

    `idle[group]` are these pages, least recently used first. Within a path of the tree a page comes after
    those that follow it: tables give their pages back last first.
    """

    def __init__(self, num_groups: int, num_blocks: int) -> None:
        self.pools = tuple(BlockPool(num_blocks) for _ in range(num_groups))
        self.idle: tuple[OrderedDict[int, None], ...] = tuple(OrderedDict() for _ in self.pools)
        self.copies: list[PageCopy] = []  # to be made in this order before anything is read or written
        self.num_cached = 0  # pages in the tree, all groups together
        self.num_shared = 0  # pages in two tables or more, all groups together
        self.num_copied = 0  # pages copied so far
        self.tables: WeakSet[HasTables] = WeakSet()  # all that hold pages: for checks
        self._cached = tuple(bytearray(num_blocks) for _ in self.pools)
        self._evict: Callable[[int], None] = _nothing_to_evict

    def evict_with(self, evict: Callable[[int], None]) -> None:
        """`evict(group)` frees at least one page of that group's `idle`; called only when there is one."""
        self._evict = evict

    def available(self, group: int) -> int:
        """Pages of the group that can be allocated now, some after evicting others."""
        return self.pools[group].num_free + len(self.idle[group])

    @property
    def num_available(self) -> int:
        """The same in the scarcest group."""
        if len(self.pools) == 1:
            return self.available(0)
        return min(map(self.available, range(len(self.pools))))

    def allocate(self, counts: Sequence[int]) -> list[list[int]]:
        """`counts[g]` pages of each group g, least recently used pages of the tree evicted where needed. All
        or nothing: raises `OutOfPagesError`, and nothing is evicted then."""
        for group, count in enumerate(counts):
            if count > (available := self.available(group)):
                raise OutOfPagesError(
                    f"{count} KV pages are needed; {available} of {self.pools[group].num_blocks} are free"
                )
        return [self._allocate(group, count) for group, count in enumerate(counts)]

    def _allocate(self, group: int, count: int) -> list[int]:
        pool = self.pools[group]
        while pool.num_free < count:
            self._evict(group)
        return pool.allocate(count)

    def copy(self, group: int, src: int, dst: int) -> None:
        """`dst`, just allocated, is to become what `src` is. The source may be freed and allocated again
        before that: copies are made before whoever has it then writes to it."""
        self.num_copied += 1
        if src != dst:  # the source was evicted to make room for its own copy
            self.copies.append(PageCopy(group, src, dst))

    def hold(self, group: int, pages: Iterable[int]) -> None:
        """One more table has these pages; −1 is none."""
        pool, cached, idle = self.pools[group], self._cached[group], self.idle[group]
        for page in pages:
            if page >= 0:
                tables = pool.incref(page) - cached[page]
                if tables == 1:
                    del idle[page]
                elif tables == 2:
                    self.num_shared += 1

    def drop(self, group: int, pages: Iterable[int]) -> None:
        """One table fewer has these pages; −1 is none. In a group without a window: last pages first."""
        pool, cached, idle = self.pools[group], self._cached[group], self.idle[group]
        for page in pages:
            if page >= 0:
                tables = pool.decref(page) - cached[page]
                if tables == 1:
                    self.num_shared -= 1
                elif tables == 0 and cached[page]:
                    idle[page] = None

    def drop_table(self, group: int, table: "array[int]") -> None:
        """A table, or the end of one, gives its pages back."""
        self.drop(group, reversed(table))

    def touch(self, pages: Iterable[int]) -> None:
        """A page of each group was read: if idle, it is the last to be evicted. A table holds the pages that
        come before it."""
        for page, idle in zip(pages, self.idle, strict=True):
            if page in idle:
                idle.move_to_end(page)

    def cache(self, group: int, page: int) -> None:
        """A page that a table holds enters the tree."""
        self.pools[group].incref(page)
        self._cached[group][page] = 1
        self.num_cached += 1

    def uncache(self, group: int, page: int) -> None:
        """A page that only the tree holds leaves it, and is free."""
        del self.idle[group][page]
        self._cached[group][page] = 0
        self.num_cached -= 1
        self.pools[group].decref(page)

    def is_cached(self, group: int, page: int) -> bool:
        """Whether the page is in the tree."""
        return bool(self._cached[group][page])


def _nothing_to_evict(group: int) -> None:
    raise AssertionError(f"group {group} has no page to evict")
