"""What an engine has done: `EngineStatistics`, and the recorder that counts it."""

from collections.abc import Sequence as Listed

from ..kvcache import KvCache, PrefixStatistics
from ..models.spec import ModelSpec
from ..records import dataclass
from .histogram import LatencyHistogram, Quantiles
from .scheduler import Scheduler
from .sequence import Sequence
from .sequence_state import Chunk
from .step_time import StepShape


@dataclass(frozen=True)
class StepStatistics:
    """One step, or `steps` like it that the executor took in one call. `seconds` are those of all of it;
    `executor_seconds` what the executor had of them."""

    shape: StepShape
    seconds: float
    executor_seconds: float
    steps: int = 1


@dataclass(frozen=True)
class EngineStatistics:
    """An engine as it is now, and what it has done since it was made. Times in seconds; pages are those of
    the window group that has fewest free."""

    waiting: int  # requests, and answers that had to stop
    waiting_tokens: int
    running: int  # answers
    pages: int
    pages_used: int  # by running answers
    pages_free: int  # the prefix tree's that nobody uses among them
    pages_shared: int  # by several; of all groups together
    wasted_tokens: int  # room in pages that sequences hold and have not filled
    prefix: PrefixStatistics
    requests_added: int
    requests_finished: int
    requests_failed: int
    requests_aborted: int
    preemptions: int
    allocation_failures: int
    steps: int
    prefill_tokens: int  # computed
    decode_tokens: int  # chosen
    draft_tokens: int  # proposed
    accepted_tokens: int  # of these
    last_step: StepStatistics | None
    mean_batch: float  # sequences in a step
    busy_seconds: float  # in steps
    executor_seconds: float  # of these
    time_to_first_token: Quantiles  # of requests
    time_between_tokens: Quantiles
    latency: Quantiles  # of requests that finished, from when they were added
    bandwidth_share: float | None  # of what the machine can read; None where that is not known

    @property
    def tokens_per_second(self) -> float:
        """Tokens of answers in the time that steps took."""
        return self.decode_tokens / self.busy_seconds if self.busy_seconds else 0.0

    @property
    def hit_rate(self) -> float:
        """The share of prompts' tokens that were in the cache already."""
        return self.prefix.hit_rate


class StatisticsRecorder:
    """Counts what an engine does. `bandwidth` is what the machine can read, in bytes a second."""

    def __init__(
        self, spec: ModelSpec, *, weight_bytes: int, kv_token_bytes: float, bandwidth: float | None
    ) -> None:
        self._weight_bytes, self._bandwidth = weight_bytes, bandwidth
        windows: Listed[int | None] = spec.sliding_windows or (None,) * spec.num_layers
        # What a token of the cache takes in the layers of each window.
        self._windows = [
            (window, kv_token_bytes * windows.count(window) / len(windows))
            for window in dict.fromkeys(windows)
        ]
        self.added = self.finished = self.failed = self.aborted = 0
        self.steps = self.prefill_tokens = self.decode_tokens = self.sequences = 0
        self.draft_tokens = self.accepted_tokens = 0
        self.busy_seconds = self.executor_seconds = self.bytes_read = 0.0
        self.last_step: StepStatistics | None = None
        self.first_token, self.between_tokens = LatencyHistogram(), LatencyHistogram()
        self.latency = LatencyHistogram()

    def step(self, step: StepStatistics, chunks: Listed[Chunk[Sequence]], skipped_bytes: int) -> None:
        """A step was run, or several in a call, and tokens chosen; of the weights `skipped_bytes` were not
        read."""
        shape, steps = step.shape, step.steps
        self.steps += steps
        self.prefill_tokens += shape.prefill_tokens
        self.draft_tokens += shape.draft_tokens
        self.sequences += steps * shape.sequences
        self.busy_seconds += step.seconds
        self.executor_seconds += step.executor_seconds
        self.last_step = step
        self.bytes_read += steps * self._weight_bytes - skipped_bytes
        for window, token_bytes in self._windows:
            for chunk in chunks:
                context = max(0.0, chunk.sequence.computed - (steps - 1) / 2)  # on average
                self.bytes_read += steps * token_bytes * (context if window is None else min(context, window))

    def token(self, sequence: Sequence, now: float) -> None:
        """A token of an answer was chosen."""
        self.decode_tokens += 1
        if sequence.last_token_at is not None:
            self.between_tokens.add(now - sequence.last_token_at)
        elif sequence.index == 0:
            self.first_token.add(now - sequence.added)

    def end(self, sequence: Sequence) -> None:
        """A request has ended; the sequence is its first."""
        if sequence.error is not None:
            self.failed += 1
        elif any(sample.finish_reason == "abort" for sample in sequence.samples):
            self.aborted += 1
        else:
            self.finished += 1
            self.latency.add(sequence.timings.total)

    def snapshot(self, scheduler: Scheduler[Sequence], cache: KvCache) -> EngineStatistics:
        prefix, size = cache.statistics, cache.page_size
        wasted = sum(s.blocks.num_pages * size - s.computed for s in scheduler.running)
        return EngineStatistics(
            waiting=len(scheduler.waiting),
            waiting_tokens=scheduler.waiting.num_tokens,
            running=len(scheduler.running),
            pages=cache.num_blocks,
            pages_used=cache.num_blocks - cache.pages_available,
            pages_free=cache.pages_available,
            pages_shared=prefix.shared_pages,
            wasted_tokens=wasted,
            prefix=prefix,
            requests_added=self.added,
            requests_finished=self.finished,
            requests_failed=self.failed,
            requests_aborted=self.aborted,
            preemptions=scheduler.preemptions,
            allocation_failures=scheduler.allocation_failures,
            steps=self.steps,
            prefill_tokens=self.prefill_tokens,
            decode_tokens=self.decode_tokens,
            draft_tokens=self.draft_tokens,
            accepted_tokens=self.accepted_tokens,
            last_step=self.last_step,
            mean_batch=self.sequences / self.steps if self.steps else 0.0,
            busy_seconds=self.busy_seconds,
            executor_seconds=self.executor_seconds,
            time_to_first_token=self.first_token.quantiles(),
            time_between_tokens=self.between_tokens.quantiles(),
            latency=self.latency.quantiles(),
            bandwidth_share=self._bandwidth_share(),
        )

    def _bandwidth_share(self) -> float | None:
        if self._bandwidth is None or not self.executor_seconds:
            return None
        return self.bytes_read / self.executor_seconds / self._bandwidth
