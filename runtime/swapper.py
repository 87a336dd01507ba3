"""`Swapper`: preempted sequences' pages wait in host memory, or in a file."""

from contextlib import suppress

from ..kvcache import FileStore, KvCache, OutOfPagesError, SwapSpace
from .executor import Executor
from .page_copies import PageCopies
from .sequence_state import SequenceState


class Swapper:
    """Keeps what a preempted sequence's pages hold, up to `swap_bytes`: in host memory where the executor
    says that this is cheaper than computing it again; or in `file`, where there is one, if that takes less
    time."""

    def __init__(
        self,
        executor: Executor,
        cache: KvCache,
        copies: PageCopies,
        swap_bytes: int,
        file: FileStore | None = None,
    ) -> None:
        self._executor, self._copies, self._file = executor, copies, file
        self._space = SwapSpace(cache, swap_bytes, executor.kv_layout.group_bytes, file)
        self.count = 0  # sequences so far

    @property
    def used(self) -> int:
        """Bytes kept now."""
        return self._space.used

    def keep(self, sequence: SequenceState, compute_seconds: float) -> None:
        """Keeps what a sequence that has to stop has computed, if that is worth it; to compute it again takes
        `compute_seconds`. It is no error when that fails, as on a full disk: then it is computed again."""
        if self._is_cheaper(sequence.computed, compute_seconds):
            with suppress(Exception):
                self._copies.make()
                blocks, computed = sequence.blocks, sequence.computed
                self.count += self._space.swap_out(sequence, blocks, computed, self._executor)

    def _is_cheaper(self, computed: int, compute_seconds: float) -> bool:
        if self._file is None:
            return self._executor.swap_is_cheaper(computed)
        return self._file.seconds(self._space.size(computed)) < compute_seconds

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
