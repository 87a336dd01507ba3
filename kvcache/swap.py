"""`SwapSpace`: what preempted sequences' pages held, kept in host memory."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .cache import KvCache
from .prefix_tree import first_visible
from .sequence_blocks import SequenceBlocks, pages_for


class PageReader(Protocol):
    """What reads an executor's pages."""

    def read_blocks(self, ids: NDArray[np.int32], group: int = 0) -> bytes: ...


class PageWriter(Protocol):
    """What writes an executor's pages."""

    def write_blocks(self, ids: NDArray[np.int32], data: bytes, group: int = 0) -> None: ...


@dataclass(frozen=True)
class _Swapped:
    """Of each group, the pages that hold what token `computed` sees, one after the other."""

    computed: int
    data: tuple[bytes, ...]

    @property
    def size(self) -> int:
        return sum(map(len, self.data))


class SwapSpace:
    """Up to `limit` bytes of pages, by any key. `page_bytes` are those of one page of each window group
    (`KvLayout.group_bytes`).

    Worth it where pages are in other memory than the host's (`Executor.swap_is_cheaper`): a sequence gives
    its pages up and later gets their bytes back into others, instead of computing them again.
    """

    def __init__(self, cache: KvCache, limit: int, page_bytes: Sequence[int]) -> None:
        if limit < 0:
            raise ValueError(f"limit is {limit}; expected at least 0 bytes")
        if len(page_bytes) != cache.num_groups or min(page_bytes) < 1:
            raise ValueError(
                f"page_bytes is {list(page_bytes)}; expected bytes of {cache.num_groups} groups' pages"
            )
        self._cache, self._limit, self._page_bytes = cache, limit, tuple(page_bytes)
        self._swapped: dict[Hashable, _Swapped] = {}
        self._used = 0

    @property
    def limit(self) -> int:
        """Bytes at most."""
        return self._limit

    @property
    def used(self) -> int:
        """Bytes held."""
        return self._used

    def __contains__(self, key: Hashable) -> bool:
        return key in self._swapped

    def __len__(self) -> int:
        return len(self._swapped)

    def has_room(self, computed: int) -> bool:
        """Whether the pages of a sequence's first `computed` tokens fit in what is left."""
        pages = pages_for(computed, self._cache.page_size)
        sizes = ((pages - self._first(g, computed)) * size for g, size in enumerate(self._page_bytes))
        return self._used + sum(sizes) <= self._limit

    def swap_out(self, key: Hashable, blocks: SequenceBlocks, computed: int, reader: PageReader) -> bool:
        """Keeps what the pages of a sequence's first `computed` tokens hold, as far as later tokens see them;
        the sequence has them still, and may release them. False, and nothing is kept, where they do not fit.
        All pending copies must have been made."""
        if key in self._swapped:
            raise ValueError(f"sequence {key!r} is swapped out already")
        if not 0 <= computed <= blocks.num_tokens:
            raise ValueError(f"{computed} tokens cannot be computed: {blocks.num_tokens} have pages")
        self._check_copies()
        if not self.has_room(computed):
            return False
        pages = pages_for(computed, self._cache.page_size)
        data = []
        for group, (table, size) in enumerate(zip(blocks.tables, self._page_bytes, strict=True)):
            held = table[self._first(group, computed) : pages]
            if -1 in held:
                raise ValueError(f"pages that token {computed} of sequence {key!r} sees have left a window")
            read = reader.read_blocks(np.array(held, np.int32), group) if held else b""
            if len(read) != len(held) * size:
                raise ValueError(
                    f"{len(held)} pages of group {group} have {len(read)} bytes; expected {size} each"
                )
            data.append(read)
        self._swapped[key] = swapped = _Swapped(computed, tuple(data))
        self._used += swapped.size
        return True

    def swap_in(
        self, key: Hashable, blocks: SequenceBlocks, tokens: Sequence[int], writer: PageWriter
    ) -> int:
        """Fills an empty table with pages that hold what was kept, and forgets it. Full pages that the prefix
        tree has of `tokens`, the sequence's, are shared instead. Returns how many tokens are computed. All or
        nothing: raises `OutOfPagesError` where there are too few pages, and what the writer raises."""
        swapped = self._swapped[key]
        self._check_copies()
        size, pages = self._cache.page_size, pages_for(swapped.computed, self._cache.page_size)
        try:
            shared = self._cache.share(blocks, tokens[: swapped.computed])
            blocks.append(swapped.computed - shared)
            blocks.release_window(swapped.computed)
            for group, table in enumerate(blocks.tables):
                first = self._first(group, swapped.computed)
                begin = max(first, shared // size)
                if begin < pages:
                    data = swapped.data[group][(begin - first) * self._page_bytes[group] :]
                    writer.write_blocks(np.array(table[begin:pages], np.int32), data, group)
        except BaseException:
            blocks.release()
            raise
        self.discard(key)
        return swapped.computed

    def discard(self, key: Hashable) -> None:
        """Forgets a sequence's pages; nothing happens when none are kept."""
        if (swapped := self._swapped.pop(key, None)) is not None:
            self._used -= swapped.size

    def _first(self, group: int, computed: int) -> int:
        """The first page of a group that token `computed` sees."""
        return first_visible(self._cache.windows[group], computed) // self._cache.page_size

    def _check_copies(self) -> None:
        if self._cache.has_copies:
            raise ValueError(
                "pages are still to be copied: take_copies comes before they are read or written"
            )
