"""`WaitingQueue`: requests that have not started, or had to stop, most urgent first."""

from typing import Generic

from ..errors import QueueFull
from .removable_heap import RemovableHeap
from .sequence_state import State


class WaitingQueue(Generic[State]):
    """Sequences by `order`. At most `max_waiting` of them, and `max_waiting_tokens` tokens together, before a
    new one is refused; None is no bound. Every operation is O(log n)."""

    def __init__(self, *, max_waiting: int | None = None, max_waiting_tokens: int | None = None) -> None:
        self._max_waiting, self._max_tokens = max_waiting, max_waiting_tokens
        self._heap: RemovableHeap[State] = RemovableHeap()
        self._tokens: dict[State, int] = {}
        self.num_tokens = 0  # of all that wait

    def __len__(self) -> int:
        return len(self._heap)

    def check_room(self, tokens: int) -> None:
        """Raises `QueueFull` where another request of that many tokens has no place."""
        if self._max_waiting is not None and len(self) >= self._max_waiting:
            raise QueueFull(f"{len(self)} requests are waiting; max_waiting is {self._max_waiting}")
        # A request longer than the bound is taken when nothing else waits: it could never be, otherwise.
        if self._max_tokens is not None and len(self) and self.num_tokens + tokens > self._max_tokens:
            raise QueueFull(
                f"{self.num_tokens} tokens are waiting, and the request has {tokens}; "
                f"max_waiting_tokens is {self._max_tokens}"
            )

    def push(self, sequence: State) -> None:
        self._heap.push(sequence, sequence.order)
        self._tokens[sequence] = len(sequence.tokens)
        self.num_tokens += len(sequence.tokens)

    def peek(self) -> State | None:
        """The most urgent one."""
        return self._heap.peek()

    def discard(self, sequence: State) -> bool:
        """Takes it out; False when it is not in."""
        self.num_tokens -= self._tokens.pop(sequence, 0)
        return self._heap.discard(sequence)
