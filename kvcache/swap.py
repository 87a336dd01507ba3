"""`SwapSpace`: what preempted sequences' pages held, kept in host memory or in a file."""

from collections.abc import Hashable, Iterator, Sequence
from itertools import chain
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..records import dataclass
from .cache import KvCache
from .prefix_tree import first_visible
from .sequence_blocks import SequenceBlocks, pages_for
from .swap_store import HostStore, SwapStore

RUN_BYTES = 4 << 20  # of pages that are read or written together: held once more while they are


class PageReader(Protocol):
    """What reads an executor's pages."""

    def read_blocks(self, ids: NDArray[np.int32], group: int = 0) -> bytes: ...


class PageWriter(Protocol):
    """What writes an executor's pages."""

    def write_blocks(self, ids: NDArray[np.int32], data: bytes, group: int = 0) -> None: ...


@dataclass(frozen=True)
class _Swapped:
    """The pages that hold what token `computed` sees, in runs: a store's key for each, of each group."""

    computed: int
    runs: tuple[tuple[Hashable, ...], ...]
    size: int  # bytes


class SwapSpace:
    """Up to `limit` bytes of pages, by any key. `page_bytes` are those of one page of each window group
    (`KvLayout.group_bytes`). `store` is where they are kept, by default host memory.

    Worth it where that is other memory than the pages' own: a sequence gives its pages up and later gets
    their bytes back into others, instead of computing them again.
    """

    def __init__(
        self, cache: KvCache, limit: int, page_bytes: Sequence[int], store: SwapStore | None = None
    ) -> None:
        if limit < 0:
            raise ValueError(f"limit is {limit}; expected at least 0 bytes")
        if len(page_bytes) != cache.num_groups or min(page_bytes) < 1:
            raise ValueError(
                f"page_bytes is {list(page_bytes)}; expected bytes of {cache.num_groups} groups' pages"
            )
        self._cache, self._limit, self._page_bytes = cache, limit, tuple(page_bytes)
        self._store: SwapStore = HostStore() if store is None else store
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

    def size(self, computed: int) -> int:
        """Bytes of the pages of a sequence's first `computed` tokens, as far as later tokens see them."""
        pages = pages_for(computed, self._cache.page_size)
        return sum((pages - self._first(g, computed)) * size for g, size in enumerate(self._page_bytes))

    def has_room(self, computed: int) -> bool:
        """Whether they fit in what is left."""
        return self._used + self.size(computed) <= self._limit

    def swap_out(self, key: Hashable, blocks: SequenceBlocks, computed: int, reader: PageReader) -> bool:
        """Keeps what the pages of a sequence's first `computed` tokens hold, as far as later tokens see them;
        the sequence has them still, and may release them. False, and nothing is kept, where they do not fit.
        All pending copies must have been made. Raises what the reader and the store raise, and keeps nothing
        then."""
        if key in self._swapped:
            raise ValueError(f"sequence {key!r} is swapped out already")
        if not 0 <= computed <= blocks.num_tokens:
            raise ValueError(f"{computed} tokens cannot be computed: {blocks.num_tokens} have pages")
        self._check_copies()
        if not self.has_room(computed):
            return False
        pages = pages_for(computed, self._cache.page_size)
        tables = [table[self._first(g, computed) : pages] for g, table in enumerate(blocks.tables)]
        if any(-1 in held for held in tables):
            raise ValueError(f"pages that token {computed} of sequence {key!r} sees have left a window")
        runs: list[list[Hashable]] = [[] for _ in tables]
        try:
            for group, held in enumerate(tables):
                for begin, end in self._runs(group, len(held)):
                    data = self._read(reader, held[begin:end], group)
                    runs[group].append(self._store.put(data, self._page_bytes[group]))
        except BaseException:
            self._drop(runs)
            raise
        self._swapped[key] = _Swapped(computed, tuple(map(tuple, runs)), self.size(computed))
        self._used += self.size(computed)
        return True

    def _read(self, reader: PageReader, pages: Sequence[int], group: int) -> bytes:
        data, size = reader.read_blocks(np.array(pages, np.int32), group), self._page_bytes[group]
        if len(data) != len(pages) * size:
            raise ValueError(
                f"{len(pages)} pages of group {group} have {len(data)} bytes; expected {size} each"
            )
        return data

    def swap_in(
        self, key: Hashable, blocks: SequenceBlocks, tokens: Sequence[int], writer: PageWriter
    ) -> int:
        """Fills an empty table with pages that hold what was kept, and forgets it. Full pages that the prefix
        tree has of `tokens`, the sequence's, are shared instead. Returns how many tokens are computed. All or
        nothing: raises `OutOfPagesError` where there are too few pages, and what the writer and the store
        raise."""
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
                for run, (start, end) in zip(
                    swapped.runs[group], self._runs(group, pages - first), strict=True
                ):
                    if first + end > begin:
                        skipped = max(0, begin - first - start)
                        data = self._store.get(run)[skipped * self._page_bytes[group] :]
                        held = table[first + start + skipped : first + end]
                        writer.write_blocks(np.array(held, np.int32), data, group)
        except BaseException:
            blocks.release()
            raise
        self.discard(key)
        return swapped.computed

    def discard(self, key: Hashable) -> None:
        """Forgets a sequence's pages; nothing happens when none are kept."""
        if (swapped := self._swapped.pop(key, None)) is not None:
            self._used -= swapped.size
            self._drop(swapped.runs)

    def _drop(self, runs: Sequence[Sequence[Hashable]]) -> None:
        for run in chain.from_iterable(runs):
            self._store.drop(run)

    def _runs(self, group: int, pages: int) -> Iterator[tuple[int, int]]:
        """Where the runs of so many pages begin and end."""
        step = max(1, RUN_BYTES // self._page_bytes[group])
        for begin in range(0, pages, step):
            yield begin, min(begin + step, pages)

    def _first(self, group: int, computed: int) -> int:
        """The first page of a group that token `computed` sees."""
        return first_visible(self._cache.windows[group], computed) // self._cache.page_size

    def _check_copies(self) -> None:
        if self._cache.has_copies:
            raise ValueError(
                "pages are still to be copied: take_copies comes before they are read or written"
            )
