"""`PageSupply`: whether there are pages for what a sequence needs next."""

from collections.abc import Iterable
from typing import Generic

from ..kvcache import KvCache, OutOfPagesError
from .sequence_state import State

# Steps for which a request that found no pages is not looked at again while there are no more of them.
_RETRY = 8


class PageSupply(Generic[State]):
    """A sequence's pages come from here, so that what was refused is counted."""

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache
        self._blocked: tuple[State, int, int] | None = None  # it, pages there were, steps left to wait
        self.failures = 0

    def reserve(self, sequence: State, count: int) -> bool:
        """Pages for the next `count` tokens; False where there are too few. A step that was interrupted has
        reserved some of them already."""
        blocks = sequence.blocks
        more = sequence.computed + count - blocks.num_tokens
        if more > 0:
            try:
                blocks.append(more)
            except OutOfPagesError:
                self.failures += 1
                return False
        return True

    def are_there(self, sequences: Iterable[State], count: int) -> bool:
        """Whether `reserve` finds pages for the next `count` tokens of each."""
        needed = sum(
            s.blocks.pages_needed(max(0, s.computed + count - s.blocks.num_tokens)) for s in sequences
        )
        return needed <= self._cache.pages_available

    def most(self, sequence: State, count: int) -> int:
        """The most of the next `count` tokens for which there are pages."""
        blocks, available = sequence.blocks, self._cache.pages_available
        more = sequence.computed + count - blocks.num_tokens
        if more <= 0 or blocks.pages_needed(more) <= available:
            return count
        size = self._cache.page_size
        more = min(more, (blocks.num_pages + available) * size - blocks.num_tokens)
        while more > 0 and blocks.pages_needed(more) > available:
            more -= size  # a page is needed for a copy
        return blocks.num_tokens + max(0, more) - sequence.computed

    def can_start(self, sequence: State, running: Iterable[State]) -> bool:
        """Whether there are pages for all tokens of a waiting sequence, besides those that running prompts
        still need."""
        promised = sum(
            other.blocks.pages_needed(len(other.tokens) - other.blocks.num_tokens)
            for other in running
            if other.blocks.num_tokens < len(other.tokens)
        )
        pages = self._cache.pages_available - promised
        if self._blocked is not None:
            blocked, there, steps = self._blocked
            if blocked is sequence and pages <= there and steps:
                self._blocked = (blocked, there, steps - 1)
                return False
        self._blocked = None
        if self._cache.fits(sequence.tokens, len(sequence.tokens) + promised * self._cache.page_size):
            return True
        self._blocked = (sequence, pages, _RETRY)
        return False
