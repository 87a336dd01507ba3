"""An executor's steps held up, so that a test knows where the engine's thread is."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Gate:
    """Steps wait until `let` lets them through, or `open` does for all. `steps` counts those that came."""

    def __init__(self, step: Callable[[Any], Any]) -> None:
        self._step = step
        self._arrived, self._allowed = threading.Semaphore(0), threading.Semaphore(0)
        self._open = False
        self.steps = 0

    def __call__(self, batch: Any) -> Any:
        self.steps += 1
        self._arrived.release()
        if not self._open:
            self._allowed.acquire()
        return self._step(batch)

    def let(self, steps: int) -> None:
        """Lets steps through; returns when the one after them waits."""
        for _ in range(steps):
            self.pass_one()
        self.wait()
        self._arrived.release()

    def pass_one(self) -> None:
        """Lets the step through that waits, or comes next. There may be none after it."""
        self.wait()
        self._allowed.release()

    def wait(self) -> None:
        """Returns when a step waits."""
        assert self._arrived.acquire(timeout=60)

    def open(self) -> None:
        self._open = True
        self._allowed.release()


@contextmanager
def gated(executor: Any) -> Iterator[Gate]:
    """Holds the executor's steps up for as long as the block runs, or until it opens the gate."""
    gate = Gate(executor.step)
    executor.step = gate
    # A call of several steps takes the one that is held up.
    executor.decode = lambda batch, *limits: [gate(batch).argmax(axis=1).tolist()]
    try:
        yield gate
    finally:
        gate.open()
        del executor.step, executor.decode
