"""`BlockPool`: which pages are free, and how many hold each of the others."""

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

    def incref(self, block: int) -> int:
        """One more holder for a page that is in use; returns how many there are."""
        self._check(block)
        count = self._references[block]
        if count == 0:
            raise ValueError(f"page {block} is free and cannot be shared")
        self._references[block] = count + 1
        return count + 1

    def decref(self, block: int) -> int:
        """One holder fewer; returns how many are left. A page without holders is free. Raises `ValueError`
        for a page that is free already."""
        self._check(block)
        count = self._references[block] - 1
        if count < 0:
            raise ValueError(f"page {block} is freed twice")
        self._references[block] = count
        if count == 0:
            self._free.append(block)
        return count

    def _check(self, block: int) -> None:
        if not 0 <= block < len(self._references):
            raise ValueError(f"page {block} does not exist; the pool has pages 0 to {self.num_blocks - 1}")
