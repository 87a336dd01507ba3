"""Where the engine's thread puts what becomes of requests, for a caller in a thread of its own."""

from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Protocol

from ..errors import NybbleError
from ..records import dataclass
from .outputs import Piece
from .sequence import Sequence

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop  # importing it takes a tenth of a start


@dataclass(frozen=True, eq=False)
class Added:
    """The engine took a request; only sinks that stream hear of it."""

    sequence: Sequence


@dataclass(frozen=True, eq=False)
class Refused:
    """None of a submission's requests runs, because of request number `index`."""

    index: int
    error: NybbleError


@dataclass(frozen=True, eq=False)
class Ended:
    """A request has ended, and its sequence changes no more. `error` is set where it failed."""

    sequence: Sequence
    error: NybbleError | None = None


Event = Added | Refused | Piece | Ended


class Sink(Protocol):
    """Takes a submission's events, in order. With `event_loop`, `put` is called there, else on the engine's
    thread, which it must not hold up. Pieces come only where it is `streaming`."""

    streaming: bool

    @property
    def event_loop(self) -> "AbstractEventLoop | None": ...

    def put(self, event: Event) -> None: ...


# Seconds between two looks for an interrupt: one that arrives just before a thread sleeps does not wake it.
INTERRUPT_SECONDS = 0.2


class ThreadSink:
    """Events for threads."""

    event_loop = None

    def __init__(self, *, streaming: bool) -> None:
        self.streaming = streaming
        self._events: SimpleQueue[Event] = SimpleQueue()
        self.put = self._events.put

    def get(self) -> Event:
        """Waits for the next event. May be interrupted (`KeyboardInterrupt`)."""
        while True:
            try:
                return self._events.get(timeout=INTERRUPT_SECONDS)
            except Empty:
                pass
