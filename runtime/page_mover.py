"""`PageMover`: pages that are copied before a step, and those that wait in host memory."""

from collections import deque
from contextlib import suppress

import numpy as np

from ..kvcache import KvCache, OutOfPagesError, PageCopy, SwapSpace
from .executor import Executor
from .sequence_state import SequenceState


class PageMover:
    """Makes the copies that the cache asks for. Those that an error or an interrupt kept from being made are
    made before the next step.

    Where the executor says that it is cheaper than computing them again, what a preempted sequence's pages
    hold is kept in host memory, up to `swap_bytes` of it.
    """

    def __init__(self, executor: Executor, cache: KvCache, swap_bytes: int) -> None:
        self._executor, self._cache = executor, cache
        self._pending: deque[PageCopy] = deque()
        self._swap = SwapSpace(cache, swap_bytes, executor.kv_layout.group_bytes)
        self.swapped_out = 0  # sequences so far

    @property
    def swapped_bytes(self) -> int:
        """Bytes kept in host memory now."""
        return self._swap.used

    def make_copies(self) -> None:
        """Makes them in order."""
        self._pending += self._cache.take_copies()
        while self._pending:
            group, src, dst = self._pending[0]
            self._executor.copy_blocks(np.array([src], np.int32), np.array([dst], np.int32), group)
            self._pending.popleft()

    def keep(self, sequence: SequenceState) -> None:
        """Keeps what a sequence that has to stop has computed, if that is worth it. It is no error when that
        fails: then it is computed again."""
        if self._executor.swap_is_cheaper(sequence.computed):
            with suppress(Exception):
                self.make_copies()
                self.swapped_out += self._swap.swap_out(
                    sequence, sequence.blocks, sequence.computed, self._executor
                )

    def bring_back(self, sequence: SequenceState) -> bool:
        """Whether the sequence's pages, and its `computed`, are those that were kept."""
        if sequence not in self._swap:
            return False
        try:
            self.make_copies()
            sequence.computed = self._swap.swap_in(sequence, sequence.blocks, sequence.tokens, self._executor)
        except OutOfPagesError:
            return False
        except Exception:
            self.forget(sequence)
            return False
        return True

    def forget(self, sequence: SequenceState) -> None:
        """What was kept is not needed any more; nothing happens when nothing was."""
        self._swap.discard(sequence)
