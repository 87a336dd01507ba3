"""`EngineLoop`: the thread that owns an engine, used from others, closed and forked at any moment."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import pytest
from forked import in_child
from gate import gated
from hypothesis import given
from hypothesis import strategies as st

from nybble.errors import ExecutorError, NybbleError, RequestError
from nybble.runtime.engine import Engine
from nybble.runtime.engine_loop import EngineLoop
from nybble.runtime.sampling_params import SamplingParams
from nybble.runtime.sequence import Request
from nybble.runtime.sinks import Added, Ended, Refused, ThreadSink
from nybble.runtime.tokenizer import Tokenizer

IDS = count()


def request(max_tokens: int | None = 5, prompt: tuple[int, ...] = (5, 9, 3)) -> Request:
    return Request(str(next(IDS)), prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))


def ends(sink: ThreadSink, number: int) -> list[Ended]:
    """The next so many ends; pieces on the way are skipped."""
    found: list[Ended] = []
    while len(found) < number:
        event = sink.get()
        assert not isinstance(event, Refused), event.error
        if isinstance(event, Ended):
            found.append(event)
    return found


def answer(loop: EngineLoop, max_tokens: int = 5) -> tuple[int, ...]:
    sink = ThreadSink(streaming=False)
    loop.submit([request(max_tokens)], sink)
    (end,) = ends(sink, 1)
    assert end.error is None
    return end.sequence.output().token_ids


def interrupt_when(ready: Callable[[], bool], thread: int) -> None:
    """Interrupts a thread that goes on waiting a moment after."""
    while not ready():
        time.sleep(0.001)
    time.sleep(0.05)
    signal.pthread_kill(thread, signal.SIGINT)


@pytest.fixture
def executor(make_executor: Callable[..., Any]) -> Any:
    return make_executor(64, 4)


@pytest.fixture
def make_loop(executor: Any, byte_tokenizer: Tokenizer) -> Iterator[Callable[..., EngineLoop]]:
    loops: list[EngineLoop] = []

    def make(on_close: Callable[[], None] = lambda: None) -> EngineLoop:
        engine = Engine(executor, byte_tokenizer, max_model_len=200, max_batch_tokens=16)
        loops.append(EngineLoop(engine, on_close))
        return loops[-1]

    yield make
    for loop in loops:
        loop.close()
        assert loop._thread is None or not loop._thread.is_alive()


@pytest.fixture
def loop(make_loop: Callable[..., EngineLoop]) -> EngineLoop:
    return make_loop()


def test_a_streaming_sink_hears_of_everything_in_order(loop: EngineLoop) -> None:
    sink = ThreadSink(streaming=True)
    loop.submit([request(5)], sink)
    events = [sink.get() for _ in range(7)]
    assert isinstance(events[0], Added)
    assert isinstance(events[-1], Ended)
    pieces = events[1:-1]
    assert [piece.token_id for piece in pieces] == list(answer(loop))  # type: ignore[union-attr]


def test_another_sink_hears_of_the_ends_alone(loop: EngineLoop) -> None:
    sink = ThreadSink(streaming=False)
    lengths = [5, 1, 3]
    loop.submit([request(n) for n in lengths], sink)
    found = [sink.get() for _ in lengths]
    assert sorted(len(e.sequence.output().token_ids) for e in found if isinstance(e, Ended)) == [1, 3, 5]


def test_one_request_that_is_refused_keeps_the_others_from_running(loop: EngineLoop, executor: Any) -> None:
    sink = ThreadSink(streaming=False)
    loop.submit([request(), request(prompt=(1,) * 300), request()], sink)
    event = sink.get()
    assert isinstance(event, Refused)
    assert event.index == 1
    assert isinstance(event.error, RequestError)
    assert not loop.call(lambda engine: engine.has_work)
    assert executor.steps == []


def test_an_idle_engine_costs_nothing(loop: EngineLoop) -> None:
    answer(loop)
    loop.call(lambda engine: None)
    assert loop._thread is not None
    tick = os.sysconf("SC_CLK_TCK")

    def used() -> float:
        with open(f"/proc/self/task/{loop._thread.native_id}/stat") as file:  # type: ignore[union-attr]
            fields = file.read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / tick

    def idles() -> bool:
        before = used()
        time.sleep(0.3)
        return used() == before

    # It may just be on its way to its wait.
    assert idles() or idles()


def test_a_call_runs_between_steps_and_its_error_reaches_the_caller(loop: EngineLoop) -> None:
    threads = set()

    def look(engine: Engine) -> int:
        threads.add(threading.current_thread())
        assert not engine._stepping
        # From a callback it runs at once.
        return loop.call(lambda engine: engine.pages_free)

    sink = ThreadSink(streaming=True)
    loop.submit([request(40)], sink)
    assert {loop.call(look) for _ in range(20)} <= set(range(65))
    assert threads == {loop._thread}
    with pytest.raises(ZeroDivisionError):
        loop.call(lambda engine: 1 // 0)
    with pytest.raises(RequestError, match="a callback on the model's thread"):
        loop.call(lambda engine: loop.submit([request()], sink))
    ends(sink, 1)
    assert loop.call(look) == 64


@pytest.mark.parametrize("error", [MemoryError("no more"), ZeroDivisionError("oops"), KeyboardInterrupt()])
def test_an_error_of_the_engine_itself_fails_what_runs_and_hangs_nobody(
    loop: EngineLoop, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail() -> Any:
        raise error

    expected = answer(loop)
    with monkeypatch.context() as patch:
        patch.setattr(loop._engine._scheduler, "schedule", fail)
        sinks = [ThreadSink(streaming=streaming) for streaming in (False, True)]
        for sink in sinks:
            loop.submit([request()], sink)
        for sink in sinks:
            (end,) = ends(sink, 1)
            assert isinstance(end.error, ExecutorError)
            assert "the engine failed: " + type(error).__name__ in str(end.error)
            assert end.error.__cause__ is error
        patch.setattr(loop._engine, "add", lambda request: fail())
        loop.submit([request()], sink)
        event = sink.get()
        assert isinstance(event, Refused)
        assert "the engine failed" in str(event.error)
    assert answer(loop) == expected
    assert loop.call(lambda engine: engine.pages_free) == 64


def test_an_engine_that_cannot_be_cleared_refuses_from_then_on(
    loop: EngineLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> Any:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(loop._engine._scheduler, "schedule", fail)
    monkeypatch.setattr(loop._engine, "abort_all", fail)
    sink = ThreadSink(streaming=False)
    loop.submit([request(), request()], sink)
    assert all(end.error is not None for end in ends(sink, 2))
    loop.submit([request()], sink)
    assert isinstance(sink.get(), Refused)
    with pytest.raises(ExecutorError, match="oops"):
        loop.call(lambda engine: engine.pages_free)
    loop.close()


class TestClose:
    def test_frees_the_executor_once_after_the_last_step(
        self, make_loop: Callable[..., EngineLoop], executor: Any
    ) -> None:
        freed: list[int] = []
        loop = make_loop(lambda: freed.append(len(executor.steps)))
        sink = ThreadSink(streaming=False)
        with gated(executor) as gate, ThreadPoolExecutor(4) as pool:
            loop.submit([request(None)], sink)
            gate.let(2)
            closing = [pool.submit(loop.close) for _ in range(4)]
            while not loop.closed:
                time.sleep(0.001)
            gate.open()
            for each in closing:
                each.result()
        (end,) = ends(sink, 1)
        assert end.sequence.finish_reason == "abort"
        loop.close()
        assert freed == [3]

    def test_again_after_an_interrupt(self, make_loop: Callable[..., EngineLoop], executor: Any) -> None:
        loop = make_loop()
        main = threading.main_thread().ident or 0
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        with gated(executor) as gate, ThreadPoolExecutor(1) as pool:
            loop.submit([request(None)], ThreadSink(streaming=False))
            gate.wait()
            interrupting = pool.submit(interrupt_when, lambda: loop.closed, main)
            with pytest.raises(KeyboardInterrupt):
                loop.close()
            interrupting.result()
            signal.signal(signal.SIGINT, before)
            closing = pool.submit(loop.close)
            time.sleep(0.05)
            assert not closing.done()
            gate.open()
            closing.result()

    def test_without_a_thread(self, make_loop: Callable[..., EngineLoop]) -> None:
        freed: list[bool] = []
        loop = make_loop(lambda: freed.append(True))
        loop.close()
        loop.close()
        assert loop._thread is None
        assert freed == [True]

    def test_on_its_own_thread(self, make_loop: Callable[..., EngineLoop]) -> None:
        freed: list[bool] = []
        loop = make_loop(lambda: freed.append(True))
        sink = ThreadSink(streaming=False)
        loop.submit([request(None)], sink)
        loop.call(lambda engine: loop.close())
        assert ends(sink, 1)[0].sequence.finish_reason == "abort"
        loop.close()
        assert freed == [True]

    def test_what_comes_after_is_answered(self, make_loop: Callable[..., EngineLoop]) -> None:
        for started in (False, True):
            loop = make_loop()
            if started:
                answer(loop)
            loop.close()
            sink = ThreadSink(streaming=True)
            loop.submit([request()], sink)
            event = sink.get()
            assert isinstance(event, Refused)
            assert "closed" in str(event.error)
            loop.abort(["anything"])
            assert loop.call(lambda engine: engine.pages_free) == 64

    @given(st.integers(0, 3), st.integers(0, 300))
    def test_during_everything(self, submitters: int, after: int) -> None:
        loop = self.busy()
        stop = threading.Event()

        def submit() -> None:
            while not stop.is_set():
                sink = ThreadSink(streaming=after % 2 == 0)
                wanted = request(3)
                loop.submit([wanted], sink)
                if after % 3 == 0:
                    loop.abort([wanted.id])
                while not isinstance(event := sink.get(), Ended | Refused):
                    pass
                assert isinstance(event, Ended) or "closed" in str(event.error)
                if loop.closed:
                    return

        with ThreadPoolExecutor(4) as pool:
            running = [pool.submit(submit) for _ in range(submitters)]
            for _ in range(after):
                loop.call(lambda engine: None)
            loop.close()
            assert loop._thread is None or not loop._thread.is_alive()
            stop.set()
            for each in running:
                each.result()
        assert loop.call(lambda engine: (engine.has_work, engine.pages_free)) == (False, 64)

    @pytest.fixture(autouse=True)
    def make_busy(self, request: pytest.FixtureRequest) -> None:
        make_executor = request.getfixturevalue("make_executor")
        tokenizer = request.getfixturevalue("byte_tokenizer")
        self.busy = lambda: EngineLoop(
            Engine(make_executor(64, 4), tokenizer, max_model_len=200, max_batch_tokens=16)
        )

    def test_at_exit(self) -> None:
        code = (
            "import threading;from nybble import LLM, SamplingParams\n"
            "llm = LLM('smollm2', threads=2, max_model_len=2048)\n"
            "stream = llm.stream('Once', SamplingParams(ignore_eos=True))\n"
            "print(next(stream) is not None)\n"
            "def late():\n"
            "    threading.main_thread().join()\n"
            "    print(len(llm.generate('Once', SamplingParams(max_tokens=2)).token_ids))\n"
            "threading.Thread(target=late).start()\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
        assert (done.returncode, done.stdout, done.stderr) == (0, "True\n2\n", "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
class TestFork:
    def test_a_child_starts_a_thread_of_its_own(self, loop: EngineLoop) -> None:
        expected = answer(loop)
        assert in_child(lambda: answer(loop) == expected and loop.close() is None) == 0
        assert answer(loop) == expected

    def test_a_child_can_close_what_never_ran_there(self, loop: EngineLoop) -> None:
        answer(loop)
        assert in_child(lambda: loop.close() is None and loop.closed) == 0
        answer(loop)

    def test_what_ran_between_two_steps_ends_in_the_child(self, loop: EngineLoop) -> None:
        """On the engine's own thread, where a callback may fork, no step runs."""
        expected = answer(loop)
        sink = ThreadSink(streaming=False)
        found: list[int] = []

        def check() -> bool:
            (end,) = ends(sink, 1)
            return (
                isinstance(end.error, RequestError)
                and "forked" in str(end.error)
                and answer(loop) == expected
                and loop.call(lambda engine: engine.pages_free) == 64
            )

        def fork_in_a_thread(engine: Engine) -> None:
            # The engine is between two steps, as this thread holds it; inside a call it counts as busy.
            loop._inside = False
            thread = threading.Thread(target=lambda: found.append(in_child(check)))
            thread.start()
            thread.join()

        loop.submit([request(150)], sink)
        loop.call(fork_in_a_thread)
        assert found == [0]
        (end,) = ends(sink, 1)
        assert end.error is None

    def test_inside_a_step_the_child_is_told_to_open_the_model_again(
        self, loop: EngineLoop, executor: Any
    ) -> None:
        sink = ThreadSink(streaming=False)

        def check() -> bool:
            other = ThreadSink(streaming=True)
            loop.submit([request()], other)
            event = other.get()
            told = isinstance(event, Refused) and "open the model again in the child" in str(event.error)
            try:
                loop.call(lambda engine: None)
            except NybbleError:
                loop.close()
                return told and ends(sink, 1)[0].error is not None
            return False

        with gated(executor) as gate:
            loop.submit([request()], sink)
            gate.let(2)
            assert in_child(check) == 0
            gate.open()
        (end,) = ends(sink, 1)
        assert end.error is None
        assert len(end.sequence.output().token_ids) == 5


def test_a_loop_that_nobody_holds_any_more_is_no_reason_to_keep_its_engine(
    make_executor: Callable[..., Any], byte_tokenizer: Tokenizer
) -> None:
    import weakref

    engine = Engine(make_executor(8, 4), byte_tokenizer, max_model_len=20)
    loop = EngineLoop(engine)
    answer(loop, 2)
    loop.close()
    kept = weakref.ref(engine)
    del loop, engine
    gc.collect()
    assert kept() is None
