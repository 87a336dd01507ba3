"""`Engine`: requests in, tokens out, one step at a time."""

import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Listed
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..devices.memory_plan import SCORE_LOGITS_BYTES
from ..errors import AllocationError, ExecutorError, NybbleError, RequestError, SettingError
from ..kvcache import FileStore, KvCache
from .answering import Rows, choose_tokens, score_tokens, take_tokens
from .batch_building import build_batch, logit_rows
from .constraint import Constraints
from .executor import Executor
from .page_copies import PageCopies
from .request_limits import RequestLimits, slid
from .sampling_params import SamplingParams
from .scheduler import AGEING_SECONDS, Scheduler
from .sequence import Request, Sequence
from .sequence_state import Chunk, shape_of
from .speculation import Speculator
from .statistics import EngineStatistics, StatisticsRecorder, StepStatistics
from .swapper import Swapper
from .token_chooser import TokenChooser
from .tokenizer import Tokenizer

__all__ = ["Engine", "build_batch"]

# After so long no further step begins in a call of the executor: whoever reads an answer gets its tokens in
# pieces that still look like a stream.
DECODE_SECONDS = 0.04


class Engine:
    """Runs requests on an executor whose cache is allocated. Not safe to use from several threads at once.

    - `max_model_len`: the most tokens of one sequence. `max_batch_tokens`: the most new tokens of one step.
      `max_sequences`: the most that run at once.
    - `eos_token_ids`: the model's own stop tokens. `generation_config`: where unset sampling settings come
      from.
    - `max_waiting`, `max_waiting_tokens`: how many requests, and tokens of theirs, may wait before `add`
      raises `QueueFull`; None is no bound.
    - `target_token_ms`: how long a step in which answers go on may be made by prompts, in milliseconds;
      without one it is 2.95 times a step without prompts.
    - `ageing_seconds`: how much longer a request has to wait to come before one of the next higher priority.
    - `share_prefixes`, `min_shared_tokens`: whether a prompt's beginning is taken from what was computed
      before, and the fewest tokens for which it is.
    - `swap_bytes`: host memory for what preempted sequences had computed, where the executor says that this
      is cheaper than to compute it again; by default as much as the cache has. `swap_file`: they wait there
      instead, where writing and reading it takes less time than computing it again.
    - `speculator`: what guesses tokens ahead, or None.
    - `bandwidth`: bytes a second that the machine can read, for the statistics.
    - `explain_shortage`: what else to say where memory ran out, such as what was planned and what would help.
    - `on_step`, `on_end`: called after each step, or several that came in one call, and with the first
      sequence of each request that ended.
    """

    def __init__(
        self,
        executor: Executor,
        tokenizer: Tokenizer,
        *,
        max_model_len: int,
        max_batch_tokens: int = 512,
        max_sequences: int = 16,
        eos_token_ids: Iterable[int] = (),
        generation_config: Mapping[str, Any] | None = None,
        max_waiting: int | None = None,
        max_waiting_tokens: int | None = None,
        target_token_ms: float | None = None,
        ageing_seconds: float = AGEING_SECONDS,
        share_prefixes: bool = True,
        min_shared_tokens: int | None = None,
        swap_bytes: int | None = None,
        swap_file: FileStore | None = None,
        speculator: Speculator | None = None,
        bandwidth: float | None = None,
        explain_shortage: Callable[[], str] | None = None,
        on_step: Callable[[StepStatistics], None] | None = None,
        on_end: Callable[[Sequence], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        for name, value in (
            ("max_model_len", max_model_len),
            ("max_batch_tokens", max_batch_tokens),
            ("max_sequences", max_sequences),
            ("max_waiting", max_waiting),
            ("max_waiting_tokens", max_waiting_tokens),
            ("min_shared_tokens", min_shared_tokens),
        ):
            if value is not None and value < 1:
                raise SettingError(f"{name} is {value}; expected at least 1")
        if target_token_ms is not None and not target_token_ms > 0:
            raise SettingError(f"target_token_ms is {target_token_ms}; expected more than 0 milliseconds")
        layout, spec = executor.kv_layout, executor.spec
        self._executor, self._tokenizer = executor, tokenizer
        self._most_steps = executor.decode_steps
        self._vocab_size = spec.vocab_size
        self._max_model_len = max_model_len
        self._max_score_tokens = max(1, SCORE_LOGITS_BYTES // (4 * self._vocab_size))
        self._eos = frozenset(eos_token_ids)
        self._generation_config = dict(generation_config or {})
        self._constraints = Constraints(tokenizer, self._vocab_size, self._eos)
        self._speculator, self._clock = speculator, clock
        self._on_step, self._on_end = on_step, on_end
        self._explain_shortage = explain_shortage
        self.cache = KvCache(
            layout.num_blocks, layout.page_size, spec.window_groups or (None,),
            share_prefixes=share_prefixes, min_shared_tokens=min_shared_tokens,
        )  # fmt: skip
        if swap_bytes is None:
            swap_bytes = layout.num_blocks * layout.bytes_per_block
        self._copies = PageCopies(executor, self.cache)
        self._swapper = Swapper(executor, self.cache, self._copies, swap_bytes, swap_file)
        self._limits = RequestLimits(self._vocab_size, max_model_len, self.cache)
        self._scheduler: Scheduler[Sequence] = Scheduler(
            self.cache,
            max_batch_tokens=max_batch_tokens,
            max_sequences=max_sequences,
            max_waiting=max_waiting,
            max_waiting_tokens=max_waiting_tokens,
            target_seconds=None if target_token_ms is None else target_token_ms / 1e3,
            ageing_seconds=ageing_seconds,
            propose=None if speculator is None else self._propose,
            count_steps=self._count_steps if self._most_steps > 1 else None,
            swapper=self._swapper,
            clock=clock,
        )
        self._recorder = StatisticsRecorder(
            spec,
            weight_bytes=executor.weight_bytes,
            kv_token_bytes=layout.bytes_per_block / layout.page_size,
            bandwidth=bandwidth,
        )
        self._sequences: dict[str, Sequence] = {}  # the first of each request
        self._stepping = False
        self._aborts: list[str] = []  # asked for inside a step

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    @property
    def pages_free(self) -> int:
        """Pages of the cache that no sequence uses, in the group that has fewest."""
        return self.cache.pages_available

    @property
    def statistics(self) -> EngineStatistics:
        """As things are now."""
        return self._recorder.snapshot(self._scheduler, self.cache)

    def add(self, request: Request) -> Sequence:
        """Queues a request and returns its first sequence, which fills as `step` is called. Raises
        `RequestError` for a prompt that is empty, too long or no tokens of this model, `DoesNotFitError` for
        one that the cache could never hold, `SettingError` for settings that do not fit the model,
        `QueueFull` where too much waits."""
        if request.id in self._sequences:
            raise RequestError(f"request {request.id} is running already")
        max_tokens = self._limits.check(request)
        self._scheduler.check_room(len(request.prompt_ids))
        params = request.params
        stop_ids = (frozenset() if params.ignore_eos else self._eos) | frozenset(params.stop_token_ids)
        sequence = Sequence(
            request,
            self._tokenizer,
            self.cache.sequence(),
            max_tokens=max_tokens,
            stop_ids=stop_ids,
            chooser=self._make_chooser(request, stop_ids),
            chunk_limit=self._max_score_tokens,
            clock=self._clock,
        )
        self._scheduler.add(sequence)
        self._sequences[request.id] = sequence
        self._recorder.added += 1
        return sequence

    def prepare(self, params: SamplingParams) -> None:
        """Does what takes long of adding a request with these settings, a grammar's compilation, so that no
        step waits for it. May be called from any thread. Raises as `add` does."""
        self._constraints.start(params)

    def step(self) -> list[Sequence]:
        """Runs one batch, or decodes in several steps, and returns the first sequence of each request in it,
        and of those that failed before they came so far. An executor's error fails these and no others.
        Empty where memory must be found first: the next step goes on."""
        started, self._stepping = self._clock(), True
        try:
            plan = self._scheduler.schedule()
            for sequence, reason in plan.failed:
                self._fail(sequence, reason)
            if plan.chunks:
                self._advance(plan.chunks, started)
        finally:
            self._stepping = False
            while self._aborts:
                self.abort(self._aborts.pop())
        touched = [sequence.first for sequence, _ in plan.failed]
        touched += [chunk.sequence.first for chunk in plan.chunks]
        return list(dict.fromkeys(touched))

    def abort(self, request_id: str) -> None:
        """Ends a request and frees its pages; nothing happens when it has ended already. Inside a step, where
        the garbage collector may ask for it, it takes effect at the step's end."""
        if self._stepping:
            self._aborts.append(request_id)
        elif (sequence := self._sequences.get(request_id)) is not None:
            for sample in sequence.samples:
                if not sample.ended:
                    sample.abort()
                    self._retire(sample)

    def abort_all(self) -> None:
        """Ends every request."""
        for request_id in list(self._sequences):
            self.abort(request_id)

    def hurry(self, wanted: bool) -> None:
        """Whether the step that runs comes to its end soon, though there might be more of it. May be called
        from any thread."""
        self._executor.hurry(wanted)

    def _advance(self, chunks: list[Chunk[Sequence]], started: float) -> None:
        try:
            before, answer = self._run(chunks)
        except (MemoryError, AllocationError) as error:
            if not self._scheduler.shrink(chunks):
                self._fail_all(chunks, self._shortage(error))
        except Exception as error:
            self._fail_all(chunks, error)
        else:
            now, shape, steps = self._clock(), shape_of(chunks), 1
            if isinstance(answer, list):
                steps = len(answer)
                self._commit_steps(chunks, answer, before, now)
            else:
                self._commit(chunks, answer, now)
            step = StepStatistics(shape, self._clock() - started, now - before, steps)
            self._scheduler.observe(shape, step.seconds / steps)
            if self._speculator is not None and not shape.prefills:
                self._speculator.observe_step(shape.decodes, shape.draft_tokens, step.seconds / steps, steps)
            self._recorder.step(step, chunks, self._executor.skipped_bytes)
            if self._on_step is not None:
                self._on_step(step)

    def _run(self, chunks: list[Chunk[Sequence]]) -> tuple[float, NDArray[np.float32] | list[list[int]]]:
        """When the executor began, and its logits; or, of several steps, the tokens that each chose."""
        batch = build_batch(chunks)
        self._copies.make()
        before = self._clock()
        if (steps := chunks[0].steps) > 1:
            ends = frozenset[int]().union(*(chunk.sequence.stop_ids for chunk in chunks))
            rules = [] if batch.best_only else [chunk.sequence.rule() for chunk in chunks]
            chosen = self._executor.decode(batch, steps, ends, DECODE_SECONDS, rules)
            if not 1 <= len(chosen) <= steps or any(len(tokens) != len(chunks) for tokens in chosen):
                shape = f"{[len(tokens) for tokens in chosen]} tokens"
                raise ExecutorError(
                    f"the executor returned {shape}; expected {len(chunks)} of 1 to {steps} steps"
                )
            return before, chosen
        logits = self._executor.step(batch)
        expected = (len(batch.logit_rows), self._vocab_size)
        if logits.shape != expected:
            raise ExecutorError(f"the executor returned logits of shape {logits.shape}; expected {expected}")
        return before, logits

    def _commit(self, chunks: list[Chunk[Sequence]], logits: NDArray[np.float32], now: float) -> None:
        row, best = 0, self._executor.best_tokens
        for chunk in chunks:
            sequence, begin = chunk.sequence, row
            row += len(logit_rows(chunk))
            rows = Rows(logits[begin:row], None if best is None else best[begin:row])
            if sequence.ended:
                continue  # another answer of its request failed in this step
            try:
                self._commit_one(chunk, rows, now)
            except Exception as error:
                self._fail(sequence, error)
            if sequence.ended and sequence.is_running:
                self._retire(sequence)

    def _commit_steps(
        self, chunks: list[Chunk[Sequence]], tokens: list[list[int]], began: float, now: float
    ) -> None:
        """`tokens` of each step, one of each chunk. The time is theirs in equal parts."""
        times = [began + (now - began) * (i + 1) / len(tokens) for i in range(len(tokens))]
        for chunk, chosen in zip(chunks, zip(*tokens, strict=True), strict=True):
            sequence = chunk.sequence
            if sequence.ended:
                continue  # another answer of its request failed in this step
            try:
                self._scheduler.advance(chunk, take_tokens(chunk, chosen, times, self._recorder))
                self._slide(sequence)
            except Exception as error:
                self._fail(sequence, error)
            if sequence.ended and sequence.is_running:
                self._retire(sequence)

    def _commit_one(self, chunk: Chunk[Sequence], rows: Rows, now: float) -> None:
        sequence, request = chunk.sequence, chunk.sequence.request
        if request.score:
            score_tokens(chunk, rows)
            self._scheduler.advance(chunk, chunk.count)
        elif not chunk.completes:
            self._scheduler.advance(chunk, chunk.count)
        else:
            others = self._others(sequence)
            kept = choose_tokens(chunk, rows, self._recorder, now, self._speculator)
            self._scheduler.advance(chunk, kept)
            for other in others:
                self._begin(other, rows, now)
            self._slide(sequence)

    def _slide(self, sequence: Sequence) -> None:
        """At the context's end, an answer may go on from a part of its text."""
        request = sequence.request
        if (
            len(sequence.tokens) >= self._max_model_len
            and not sequence.ended
            and request.on_context_end == "slide"
        ):
            self._scheduler.restart(sequence, slid(sequence.tokens, request.n_keep))

    def _others(self, sequence: Sequence) -> list[Sequence]:
        """The request's other answers, forked where its prompt ends, before the first one has a token."""
        if sequence.num_output or sequence.index:
            return []
        return [sequence.fork(i, self.cache.sequence()) for i in range(1, sequence.request.samples)]

    def _begin(self, other: Sequence, rows: Rows, now: float) -> None:
        """A forked answer shares the first one's pages, and takes its first token from the same row."""
        self._scheduler.fork(other.first, other)
        choose_tokens(Chunk(other, 0), rows, self._recorder, now)
        if other.ended:
            self._retire(other)

    def _propose(self, sequences: Listed[Sequence], room: int) -> Listed[Listed[int]]:
        assert self._speculator is not None
        return self._speculator.propose(sequences, [max(0, self._room(s) - 1) for s in sequences], room)

    def _count_steps(self, sequences: Listed[Sequence]) -> int:
        if not all(sequence.has_rule for sequence in sequences):
            return 1
        steps = min(self._most_steps, min(map(self._room, sequences)))
        if self._speculator is None or self._speculator.failure is not None:
            return steps
        return min(steps, self._speculator.rest)

    def _room(self, sequence: Sequence) -> int:
        """The most tokens that the answer may go on by before somebody looks at it; 0 where it has not begun:
        several answers begin together, where the prompt ends."""
        if not sequence.num_output:
            return 0
        return min(sequence.max_tokens - sequence.num_output, self._max_model_len - len(sequence.tokens))

    def _make_chooser(self, request: Request, stop_ids: frozenset[int]) -> TokenChooser:
        params = request.params
        return TokenChooser(
            params.resolve(self._generation_config),
            vocab_size=self._vocab_size,
            seed=request.seed,
            prompt_ids=request.prompt_ids,
            stop_ids=stop_ids,
            min_tokens=params.min_tokens,
            logit_bias=params.logit_bias,
            constraint=self._constraints.start(params),
        )

    def _shortage(self, error: MemoryError | AllocationError) -> AllocationError:
        """`error` with what else there is to say."""
        reason = str(error) or "memory ran out in a step"
        if self._explain_shortage is not None:
            reason += f"; {self._explain_shortage()}"
        shortage = AllocationError(reason)
        shortage.__cause__ = error
        return shortage

    def _fail_all(self, chunks: list[Chunk[Sequence]], error: Exception) -> None:
        for chunk in chunks:
            self._fail(chunk.sequence, error)

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        """Fails the whole request."""
        if not isinstance(error, NybbleError):
            reason = " ".join(str(error).split()) or "no message"
            wrapped = ExecutorError(f"the executor failed in a step: {type(error).__name__}: {reason}")
            wrapped.__cause__ = error
            error = wrapped
        sequence.first.error = error  # the request's, though its first answer may have ended
        for sample in sequence.samples:
            if not sample.ended:
                sample.fail(error)
                self._retire(sample)

    def _retire(self, sequence: Sequence) -> None:
        """An answer has ended."""
        self._scheduler.remove(sequence)
        if self._speculator is not None:
            self._speculator.forget(sequence)
        first = sequence.first
        if first.finished and self._sequences.pop(sequence.request.id, None) is not None:
            self._recorder.end(first)
            if self._on_end is not None:
                self._on_end(first)
