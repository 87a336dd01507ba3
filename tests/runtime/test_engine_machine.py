"""The engine on the real executor under random traffic: each request's tokens are those that it has alone,
and the cache's books are right after every step."""

from collections.abc import Sequence as Listed
from functools import cache
from typing import Any

import numpy as np
import pytest
from eager import Eager
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from numpy.typing import NDArray
from small_models import small_executor
from step_by_step import StepByStep

from nybble.errors import DeadlineExceeded, QueueFull
from nybble.kvcache import OutOfPagesError
from nybble.runtime.batch import Batch
from nybble.runtime.cpu_executor import CpuExecutor
from nybble.runtime.engine import Engine
from nybble.runtime.sampling_params import SamplingParams
from nybble.runtime.sequence import Request, Sequence
from nybble.runtime.tokenizer import Tokenizer

CONTEXT = 100
Windows = tuple[int | None, ...]
Asked = tuple[tuple[int, ...], SamplingParams, str, int]  # prompt, settings, on_context_end, n_keep


class FaultyExecutor:
    """The real one, but for steps that are told to fail."""

    def __init__(self, executor: CpuExecutor) -> None:
        self._executor = executor
        self.error: BaseException | None = None
        self.swaps = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def swap_is_cheaper(self, tokens: int) -> bool:
        return self.swaps

    def step(self, batch: Batch) -> NDArray[np.float32]:
        self._fail()
        return self._executor.step(batch)

    def decode(self, batch: Batch, *limits: Any) -> list[list[int]]:
        tokens = self._executor.decode(batch, *limits)
        self._fail()  # after steps that wrote to the pages
        return tokens

    def _fail(self) -> None:
        if self.error is not None:
            error, self.error = self.error, None
            raise error


class Oracle:
    """What requests give alone, in an engine of their own."""

    def __init__(self, windows: Windows, tokenizer: Tokenizer) -> None:
        self._executor = small_executor(windows, 16)
        self._tokenizer = tokenizer
        self.answers = cache(self._run)

    def close(self) -> None:
        self._executor.close()

    def of(self, request: Request) -> tuple[tuple[int, ...], ...]:
        return self.answers(asked_by(request))

    def _run(self, asked: Asked) -> tuple[tuple[int, ...], ...]:
        prompt, params, on_context_end, n_keep = asked
        engine = Engine(
            StepByStep(self._executor),  # type: ignore[arg-type]
            self._tokenizer,
            max_model_len=CONTEXT,
            eos_token_ids=[0],
            share_prefixes=False,
        )
        request = Request("alone", prompt, params, on_context_end=on_context_end, n_keep=n_keep)  # type: ignore[arg-type]
        sequence = engine.add(request)
        while engine.has_work:
            engine.step()
        return tuple(tuple(sample.output_ids) for sample in sequence.samples)


def asked_by(request: Request) -> Asked:
    return request.prompt_ids, request.params, request.on_context_end, request.n_keep


class Guesser:
    """Drafts what answers will be, with mistakes."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self.ended: set[Sequence] = set()

    def chances(self, sequence: Sequence, limit: int) -> list[float]:
        assert sequence not in self.ended
        assert sequence.computed == len(sequence.tokens) - 1
        length = 1 + hash((sequence.num_output, sequence.index)) % 6
        return [1.0] * min(limit, length)

    def draft(self, sequences: Listed[Sequence], counts: Listed[int]) -> list[list[int]]:
        drafts = []
        for sequence, count in zip(sequences, counts, strict=True):
            begin = sequence.num_output
            answer = self._oracle.of(sequence.request)[sequence.index] if count else ()
            draft = list(answer[begin : begin + count])
            if begin % 3 == 0 and draft:
                draft[begin % len(draft)] = 1
            drafts.append(draft)
        return drafts

    def observe(self, sequence: Sequence, proposed: int, accepted: int) -> None:
        assert 0 <= accepted <= proposed

    def seconds(self, length: int) -> float:
        return 0.0

    def forget(self, sequence: Sequence) -> None:
        assert sequence not in self.ended
        self.ended.add(sequence)

    def close(self) -> None: ...


STEMS = [tuple(np.random.default_rng(seed).integers(1, 64, 80).tolist()) for seed in range(3)]


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, ...]:
    stem = STEMS[draw(st.integers(0, 2))][: draw(st.sampled_from([0, 5, 16, 17, 31, 40, 64]))]
    return stem + tuple(draw(st.lists(st.integers(1, 63), min_size=1, max_size=8)))


@st.composite
def parameters(draw: st.DrawFn) -> SamplingParams:
    n = draw(st.sampled_from([1, 1, 1, 2, 3]))
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 1.0, 1.5])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3])),
        seed=draw(st.integers(0, 3)),
        max_tokens=draw(st.integers(1, 45)),
        n=n,
        best_of=n + 1 if draw(st.sampled_from([False, False, True])) else None,
    )


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "prompt_ids": draw(prompts()),
        "params": draw(parameters()),
        "priority": draw(st.sampled_from([0, 0, 0, 1, -1])),
        "deadline": draw(st.sampled_from([None, None, None, 30.0])),
        "on_context_end": draw(st.sampled_from(["stop", "stop", "slide"])),
        "n_keep": draw(st.sampled_from([0, 5, 20])),
    }


class EngineMachine(RuleBasedStateMachine):
    windows: Windows = (None, None)
    oracle: Oracle
    executor: CpuExecutor
    tokenizer: Tokenizer

    @initialize(
        num_blocks=st.integers(7, 16),
        max_batch_tokens=st.sampled_from([1, 7, 16, 40, 128]),
        max_sequences=st.integers(1, 6),
        share=st.sampled_from([True, True, True, False]),
        max_waiting=st.sampled_from([None, 4]),
        target_ms=st.sampled_from([None, 1e-6, 1e9]),
        drafts=st.booleans(),
        swaps=st.booleans(),
    )
    def begin(
        self, num_blocks: int, max_batch_tokens: int, max_sequences: int, share: bool,
        max_waiting: int | None, target_ms: float | None, drafts: bool, swaps: bool,
    ) -> None:  # fmt: skip
        self.executor.allocate_kv(num_blocks, kv_dtype="f16")
        self.faulty = FaultyExecutor(self.executor)
        self.faulty.swaps = swaps
        self.now = 0.0
        self.max_sequences, self.max_batch_tokens = max_sequences, max_batch_tokens
        self.speculator = Eager(Guesser(self.oracle)) if drafts else None
        self.engine = Engine(
            self.faulty,  # type: ignore[arg-type]
            self.tokenizer,
            max_model_len=CONTEXT,
            max_batch_tokens=max_batch_tokens,
            max_sequences=max_sequences,
            eos_token_ids=[0],
            share_prefixes=share,
            max_waiting=max_waiting,
            target_token_ms=target_ms,
            speculator=self.speculator,
            clock=lambda: self.now,
        )
        self.asked: dict[str, tuple[Asked, Sequence]] = {}
        self.aborted: set[str] = set()
        self.may_fail: set[str] = set()
        self.count = 0
        self.pinned: list[tuple[int, ...]] = []

    @rule(some=st.lists(requests(), min_size=1, max_size=4))
    def add(self, some: list[dict[str, Any]]) -> None:
        for settings_of in some:
            self.count += 1
            request = Request(str(self.count), **settings_of)
            try:
                sequence = self.engine.add(request)
            except QueueFull:
                continue
            self.asked[request.id] = asked_by(request), sequence

    @rule(steps=st.integers(1, 12))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self._step()

    def _step(self) -> None:
        self.now += 1
        for sequence in self.engine.step():
            assert sequence is sequence.first
        self.check()

    @rule(pick=st.integers(0, 100))
    def abort(self, pick: int) -> None:
        live = [name for name, (_, sequence) in self.asked.items() if not sequence.finished]
        if live:
            name = live[pick % len(live)]
            self.engine.abort(name)
            self.aborted.add(name)
            assert self.asked[name][1].finished

    @rule(what=st.sampled_from(["memory", "error", "interrupt"]))
    def fail_a_step(self, what: str) -> None:
        errors = {"memory": MemoryError(), "error": RuntimeError("x"), "interrupt": KeyboardInterrupt()}
        self.faulty.error = errors[what]
        before = {name for name, (_, sequence) in self.asked.items() if sequence.error is not None}
        try:
            self._step()
        except KeyboardInterrupt:
            self.check()
        failed = {name for name, (_, sequence) in self.asked.items() if sequence.error is not None} - before
        if what == "error":
            self.may_fail |= failed
        self.faulty.error = None

    @rule(pick=st.integers(0, 100))
    def no_page_once(self, pick: int) -> None:
        """A sequence is told once that there are no pages."""
        running = self.engine._scheduler.running
        if not running:
            return
        blocks = running[pick % len(running)].blocks

        def append(count: int) -> None:
            del blocks.append  # type: ignore[method-assign]
            raise OutOfPagesError("injected")

        blocks.append = append  # type: ignore[method-assign]

    @rule(pick=st.integers(0, 2), length=st.integers(1, 64))
    def pin(self, pick: int, length: int) -> None:
        tokens = STEMS[pick][:length]
        pinned = self.engine.cache.pin(tokens)
        if self.engine.cache.num_blocks - self.engine.cache.pages_pinned < 7 or not pinned:
            self.engine.cache.unpin(tokens)  # some request may not fit any more
        else:
            self.pinned.append(tokens)

    @invariant()
    def check(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.cache.check()
        scheduler = self.engine._scheduler
        assert len(scheduler.running) <= min(self.max_sequences, self.max_batch_tokens)
        assert [s.order for s in scheduler.running] == sorted(s.order for s in scheduler.running)
        for sequence in scheduler.running:
            assert sequence.is_running
            assert not sequence.ended
            assert sequence.computed <= min(len(sequence.tokens) - 1, sequence.blocks.num_tokens)
        live = {id(s) for _, q in self.asked.values() for s in q.samples if not s.ended}
        assert len(live) == len(scheduler.running) + len(scheduler.waiting)
        assert self.engine.has_work == bool(live)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(20_000):
            if not self.engine.has_work:
                break
            self._step()
        assert not self.engine.has_work, "the engine does not come to an end"
        for name, (asked, sequence) in self.asked.items():
            expected = self.oracle.answers(asked)
            found = tuple(tuple(sample.output_ids) for sample in sequence.samples)
            if sequence.error is not None:
                assert isinstance(sequence.error, DeadlineExceeded) or name in self.may_fail, sequence.error
            if sequence.error is None and name not in self.aborted:
                assert found == expected
            else:
                for mine, whole in zip(found, expected, strict=False):
                    assert mine == whole[: len(mine)]
        assert self.speculator is None or self.speculator.failure is None
        cache = self.engine.cache
        for tokens in self.pinned:
            cache.unpin(tokens)
        assert cache.pages_available == cache.num_blocks
        assert cache.statistics.shared_pages == 0
        assert cache.statistics.idle_pages == cache.statistics.cached_pages
        assert self.engine._swapper.used == 0
        statistics = self.engine.statistics
        assert (statistics.running, statistics.waiting, statistics.waiting_tokens) == (0, 0, 0)
        ended = statistics.requests_finished + statistics.requests_failed + statistics.requests_aborted
        assert ended == statistics.requests_added == len(self.asked)


@pytest.mark.parametrize("windows", [(None, None), (20, 20), (None, 20)], ids=["full", "window", "both"])
def test_any_traffic_gives_each_request_what_it_has_alone(
    windows: Windows, byte_tokenizer: Tokenizer
) -> None:
    class Machine(EngineMachine):
        pass

    Machine.windows, Machine.tokenizer = windows, byte_tokenizer
    oracle, executor = Oracle(windows, byte_tokenizer), small_executor(windows)
    Machine.oracle, Machine.executor = oracle, executor
    try:
        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=20, stateful_step_count=30, deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )  # fmt: skip
    finally:
        executor.close()
        oracle.close()
