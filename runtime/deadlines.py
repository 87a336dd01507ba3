"""`Deadlines`: which sequences must have ended by when."""

from typing import Generic

from .removable_heap import RemovableHeap
from .sequence_state import State


class Deadlines(Generic[State]):
    """Sequences by their deadline; those without one cost nothing."""

    def __init__(self) -> None:
        self._heap: RemovableHeap[State] = RemovableHeap()

    def __len__(self) -> int:
        return len(self._heap)

    def watch(self, sequence: State) -> None:
        if sequence.deadline is not None:
            self._heap.push(sequence, (sequence.deadline, sequence.order[1]))

    def discard(self, sequence: State) -> None:
        if sequence.deadline is not None:
            self._heap.discard(sequence)

    def take_expired(self, now: float) -> State | None:
        """One whose deadline has passed, which is watched no longer."""
        sequence = self._heap.peek()
        if sequence is None or sequence.deadline is None or sequence.deadline > now:
            return None
        self._heap.discard(sequence)
        return sequence
