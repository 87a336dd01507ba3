"""`PageCopies`: what the executor must copy before a step."""

from collections import deque

import numpy as np

from ..kvcache import KvCache, PageCopy
from .executor import Executor


class PageCopies:
    """Copies of pages that the cache asked for. Those that an error or an interrupt kept from being made are
    made before the next step."""

    def __init__(self, executor: Executor, cache: KvCache) -> None:
        self._executor, self._cache = executor, cache
        self._pending: deque[PageCopy] = deque()

    def make(self) -> None:
        """Makes them in order."""
        self._pending += self._cache.take_copies()
        while self._pending:
            group, src, dst = self._pending[0]
            self._executor.copy_blocks(np.array([src], np.int32), np.array([dst], np.int32), group)
            self._pending.popleft()
