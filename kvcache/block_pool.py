"""`BlockPool`: which pages are free, and how many hold each of the others."""

from collections.abc import Iterable

from ..errors import NybbleError


class OutOfPagesError(NybbleError):
    """Fewer pages are free than were asked for. The engine answers it by waiting or preempting."""


class BlockPool:
    """`num_blocks` pages, numbered from 0, each with a reference count. Knows nothing of what they hold.

    Pages are handed out from a stack, so that a page just freed, which is likely still in the CPU's cache,
    is the first to be used again. Every operation is O(pages asked for).
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; expected at least 1")
        self._references = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_blocks(self) -> int:
        return len(self._references)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def references(self, block: int) -> int:
        """How many hold the page; 0 when it is free."""
        self._check(block)
        return self._references[block]

    def allocate(self, count: int) -> list[int]:
        """`count` free pages, each with one reference. All or none: raises `OutOfPagesError`."""
        if count < 0:
            raise ValueError(f"cannot allocate {count} pages")
        if count > len(self._free):
            raise OutOfPagesError(
                f"{count} KV pages were asked for; {len(self._free)} of {self.num_blocks} are free"
            )
        if count == 0:
            return []
        taken = self._free[-count:][::-1]
        del self._free[-count:]
        for block in taken:
            self._references[block] = 1
        return taken

    def incref(self, blocks: Iterable[int]) -> None:
        """One more holder for each page, which must be in use."""
        held = list(blocks)
        for block in held:
            self._check(block)
            if self._references[block] == 0:
                raise ValueError(f"page {block} is free and cannot be shared")
        for block in held:
            self._references[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """One holder fewer for each page; those without holders become free. Raises `ValueError`, and
        changes nothing, when a page is freed more often than it is held."""
        given = list(blocks)
        dropped: dict[int, int] = {}
        for block in given:
            self._check(block)
            dropped[block] = dropped.get(block, 0) + 1
            if dropped[block] > self._references[block]:
                raise ValueError(f"page {block} is freed twice")
        # Last first, so that a table given back whole is handed out again in its own order.
        for block in reversed(given):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)

    def _check(self, block: int) -> None:
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"page {block} does not exist; the pool has pages 0 to {self.num_blocks - 1}")
