"""`EngineLoop`: the thread that owns an engine."""

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeVar

from ..errors import ExecutorError, NybbleError, RequestError
from .engine import Engine
from .sequence import Request, Sequence
from .sinks import Added, Ended, Event, Refused, Sink

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

T = TypeVar("T")

# Seconds until the next look where an engine has work but ran nothing.
STALLED = 0.001


class EngineLoop:
    """Steps an engine on a thread of its own while there is work, and sleeps otherwise. Every method may be
    called from any thread. The thread starts with the first request.

    `on_close` frees what the engine runs on; it is called once, after the last step.
    """

    def __init__(self, engine: Engine, on_close: Callable[[], None] = lambda: None) -> None:
        self._engine = engine
        self._on_close = on_close
        self._requests: dict[str, tuple[Sink, Sequence]] = {}
        self._for_event_loops: dict[AbstractEventLoop, list[tuple[Sink, Event]]] = {}
        self._inside = False  # a call of the engine, which a fork would leave half done
        self._closing = False
        self._ended = False
        self._error: NybbleError | None = None  # why the engine can't go on
        self._new_thread_state()
        _loops.add(self)

    def _new_thread_state(self) -> None:
        # A message is what to do on the thread. A destructor may put one at any moment: so a SimpleQueue.
        self._messages: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last_work = threading.Event()
        self._starting = threading.RLock()

    @property
    def closed(self) -> bool:
        return self._closing

    @property
    def on_thread(self) -> bool:
        """Whether this is the engine's thread, which must not wait for itself."""
        return self._thread is threading.current_thread()

    def submit(self, requests: Iterable[Request], sink: Sink) -> None:
        """Adds requests before the next step: all, or none where the engine refuses one. The sink hears."""
        if self.on_thread:
            raise RequestError("a callback on the model's thread cannot wait for a request; start a thread")
        self._send(partial(self._add, list(requests), sink))

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests and frees their pages before the next step; those that have ended are left alone.
        Does not wait, so that destructors and signal handlers may call it."""
        if self._thread is not None:
            self._send(partial(self._abort, list(request_ids)))

    def call(self, function: Callable[[Engine], T]) -> T:
        """What `function` returns or raises, called with the engine between two steps, after all that was
        sent before; in this thread where the engine's has ended. Raises `ExecutorError` where the engine is
        in no state to be used."""
        if self.on_thread:
            return function(self._engine)
        answer: SimpleQueue[tuple[bool, T | BaseException]] = SimpleQueue()
        self._send(partial(self._answer, function, answer))
        failed, value = answer.get()
        if failed:
            raise value  # type: ignore[misc]
        return value  # type: ignore[return-value]

    def close(self) -> None:
        """Ends every request ("abort") and the thread, which is gone when this returns; but on that thread
        itself it ends after what it is doing. May be called again, at any time."""
        self._closing = True
        thread = self._thread
        if thread is None:
            with self._starting:
                thread = self._thread
                if thread is None:
                    self._finish()
        if thread is not None and not self.on_thread:
            self._messages.put(lambda: None)  # wakes it
            self._engine.hurry(True)
            self._last_work.wait()  # an interrupted join would take the thread for one that has ended
            thread.join()

    def _send(self, message: Callable[[], None]) -> None:
        if not self._closing:
            self._start()
        self._messages.put(message)
        self._engine.hurry(True)  # it is not to wait for more than the step that runs
        if self._ended:  # possibly before it saw the message
            self._drain()

    def _start(self) -> None:
        if self._thread is not None:
            return
        with self._starting:
            if self._thread is None and not self._closing:
                thread = threading.Thread(target=self._run, name="nybble-engine", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    raise ExecutorError(f"no thread for the engine: {error}") from error
                self._thread = thread

    @property
    def _has_work(self) -> bool:
        return self._engine.has_work and self._error is None

    def _run(self) -> None:
        thread, last_work = threading.current_thread(), self._last_work
        with self._starting:
            pass  # until `_thread` is set
        while self._thread is thread and not self._closing:
            try:
                self._take_messages()
                if self._has_work and not self._closing:
                    self._step()
                self._wake_event_loops()
            except BaseException as error:
                self._fail_all(error)
                self._wake_event_loops()
        try:
            if self._thread is thread:  # else it forked, and this is the child
                self._finish()
        finally:
            last_work.set()

    def _take_messages(self) -> None:
        """Does what was asked for; waits for it when there is no work."""
        messages = self._messages
        self._engine.hurry(False)  # before the look at them: whoever puts one later asks for it again
        if not self._has_work:
            messages.get()()
        while not messages.empty():
            messages.get()()

    def _step(self) -> None:
        self._inside = True
        sequences = self._engine.step()
        self._inside = False
        for sequence in sequences:
            sink, _ = self._requests[sequence.request.id]
            if sink.streaming:
                while sequence.pieces:
                    self._deliver(sink, sequence.pieces.popleft())
            if sequence.finished:
                self._end(sequence.request.id)
        if not sequences and self._has_work:
            with suppress(Empty):
                self._messages.get(timeout=STALLED)()

    def _add(self, requests: list[Request], sink: Sink) -> None:
        added: list[Sequence] = []
        for index, request in enumerate(requests):
            try:
                added.append(self._add_one(request))
            except BaseException as error:
                self._deliver(sink, Refused(index, _as_ours(error)))
                for sequence in added:
                    self._engine.abort(sequence.request.id)
                self._inside = False
                return
        for sequence in added:
            self._requests[sequence.request.id] = sink, sequence
            if sink.streaming:
                self._deliver(sink, Added(sequence))

    def _add_one(self, request: Request) -> Sequence:
        if self._error is not None:
            raise self._error
        if self._closing:
            raise RequestError("the model is closed")
        self._inside = True
        sequence = self._engine.add(request)
        self._inside = False
        return sequence

    def _abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if request_id in self._requests:
                self._inside = True
                self._engine.abort(request_id)
                self._inside = False
                self._end(request_id)

    def _end(self, request_id: str, error: NybbleError | None = None) -> None:
        sink, sequence = self._requests.pop(request_id)
        error = error or next((s.error for s in sequence.samples if s.error is not None), None)
        self._deliver(sink, Ended(sequence, error))

    def _answer(
        self, function: Callable[[Engine], T], answer: "SimpleQueue[tuple[bool, T | BaseException]]"
    ) -> None:
        try:
            if self._error is not None:
                raise self._error
            self._inside = True
            answer.put((False, function(self._engine)))
        except BaseException as error:
            answer.put((True, error))
        self._inside = False

    def _deliver(self, sink: Sink, event: Event) -> None:
        if sink.event_loop is None:
            sink.put(event)
        else:
            self._for_event_loops.setdefault(sink.event_loop, []).append((sink, event))

    def _wake_event_loops(self) -> None:
        """Hands over what a step made: each event loop wakes once for all its sinks."""
        while self._for_event_loops:
            event_loop, events = self._for_event_loops.popitem()
            try:
                event_loop.call_soon_threadsafe(_put_all, events)
            except RuntimeError:  # it is closed: nobody is left who waits
                gone = {sink for sink, _ in events}
                self._abort([key for key, (sink, _) in self._requests.items() if sink in gone])

    def _fail_all(self, error: BaseException) -> None:
        """After an error of the engine's own: what ran has failed, and the engine starts anew."""
        failure = _as_ours(error)
        self._inside = False
        try:
            self._engine.abort_all()
        except BaseException:
            self._error = failure
        for request_id in list(self._requests):
            self._end(request_id, failure)

    def _finish(self) -> None:
        """Ends what is left and answers what was sent meanwhile. Nothing happens the second time."""
        if self._ended:
            return
        try:
            if self._error is None:
                self._abort(list(self._requests))
        except BaseException as error:
            self._fail_all(error)
        self._ended = True
        self._drain()
        self._on_close()

    def _drain(self) -> None:
        """Answers messages that no thread will take any more."""
        with self._starting, suppress(Empty):
            while True:
                self._messages.get_nowait()()
        with self._starting:
            self._wake_event_loops()

    def _after_fork(self) -> None:
        """In the child there is no thread, and nobody else who waits: its first request starts a new one."""
        forked = RequestError("the process forked; what ran before goes on in its parent")
        if self._inside:
            self._error = ExecutorError(
                "the process forked while the model was in a step; open the model again in the child"
            )
        self._inside = False
        self._new_thread_state()
        self._for_event_loops = {}
        requests, self._requests = self._requests, {}
        for sink, sequence in requests.values():
            if sink.event_loop is None:
                sink.put(Ended(sequence, forked))
        if self._error is None and requests:
            self._engine.abort_all()


def _as_ours(error: BaseException) -> NybbleError:
    if isinstance(error, NybbleError):
        return error
    reason = " ".join(str(error).split()) or "no message"
    ours = ExecutorError(f"the engine failed: {type(error).__name__}: {reason}")
    ours.__cause__ = error
    return ours


def _put_all(events: list[tuple[Sink, Event]]) -> None:
    for sink, event in events:
        sink.put(event)


_loops: "weakref.WeakSet[EngineLoop]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for loop in list(_loops):
        loop.close()


def _all_after_fork() -> None:
    for loop in list(_loops):
        loop._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_all_after_fork)
