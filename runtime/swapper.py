"""`Swapper`: preempted sequences' pages wait in host memory."""

from contextlib import suppress

from ..kvcache import KvCache, OutOfPagesError, SwapSpace
from .executor import Executor
from .page_copies import PageCopies
from .sequence_state import SequenceState


class Swapper:
    """Keeps what a preempted sequence's pages hold in host memory, up to `swap_bytes`, where the executor
    says that this is cheaper than computing it again."""

    def __init__(self, executor: Executor, cache: KvCache, copies: PageCopies, swap_bytes: int) -> None:
        self._executor, self._copies = executor, copies
        self._space = SwapSpace(cache, swap_bytes, executor.kv_layout.group_bytes)
        self.count = 0  # sequences so far

    @property
    def used(self) -> int:
        """Bytes kept now."""
        return self._space.used

    def keep(self, sequence: SequenceState) -> None:
        """Keeps what a sequence that has to stop has computed, if that is worth it. It is no error when that
        fails: then it is computed again."""
        if self._executor.swap_is_cheaper(sequence.computed):
            with suppress(Exception):
                self._copies.make()
                blocks, computed = sequence.blocks, sequence.computed
                self.count += self._space.swap_out(sequence, blocks, computed, self._executor)

    def bring_back(self, sequence: SequenceState) -> bool:
        """Whether the sequence's pages, and its `computed`, are those that were kept."""
        if sequence not in self._space:
            return False
        try:
            self._copies.make()
            blocks, tokens = sequence.blocks, sequence.tokens
            sequence.computed = self._space.swap_in(sequence, blocks, tokens, self._executor)
        except OutOfPagesError:
            return False
        except Exception:
            self.forget(sequence)
            return False
        return True

    def forget(self, sequence: SequenceState) -> None:
        """What was kept is not needed any more; nothing happens when nothing was."""
        self._space.discard(sequence)
