"""`Scheduler`: what runs in the next step."""

import itertools
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Generic

from ..errors import DeadlineExceeded, DoesNotFitError, NybbleError
from ..kvcache import KvCache
from .deadlines import Deadlines
from .page_supply import PageSupply
from .prefix_leader import follows_another
from .sequence_state import Chunk, State
from .step_time import StepShape
from .swapper import Swapper
from .token_budget import TokenBudget
from .waiting_queue import WaitingQueue

__all__ = ["Chunk", "Scheduler", "StepPlan"]

# A request that a class above another's came this much later goes before it.
AGEING_SECONDS = 10.0
# Waiting requests that are passed over in a step because others compute their prefix.
_LOOKAHEAD = 32
# Steps in which nothing could run although there was something, before a request fails by it.
_STALLED = 8
_order = attrgetter("order")
CountSteps = Callable[[Sequence[State]], int]
Propose = Callable[[Sequence[State], int], Sequence[Sequence[int]]]


@dataclass
class StepPlan(Generic[State]):
    """What runs in a step, and what never will: with the reason."""

    chunks: list[Chunk[State]] = field(default_factory=list)
    failed: list[tuple[State, NybbleError]] = field(default_factory=list)


class Scheduler(Generic[State]):
    """Most urgent first, within a budget of tokens a step: sequences that decode come first, one token each
    and what of a draft there is room for; chunks of prompts fill what is left
    (https://arxiv.org/abs/2401.08671).

    The order is fixed when a sequence is added: by the time it came, `ageing_seconds` earlier for each class
    of priority, so that whoever waits long enough comes first. Pages are taken as sequences grow. A waiting
    one starts once there are pages for all its tokens; a running one that finds none takes those of the last
    in the order, which waits again and is computed anew, but for what the prefix tree still has of it. A
    waiting one of a higher class than the last running one takes its place.

    `propose(sequences, room)` gives a draft for each of those that decode, `room` tokens at most in all.
    `count_steps(sequences)` is how many steps of one token they may take in one call, asked where all that
    run decode and nobody waits, or only for a place among them.
    `swapper` keeps what preempted sequences had computed, where that is cheaper than computing it again.
    """

    def __init__(
        self,
        cache: KvCache,
        *,
        max_batch_tokens: int,
        max_sequences: int,
        max_waiting: int | None = None,
        max_waiting_tokens: int | None = None,
        target_seconds: float | None = None,
        ageing_seconds: float = AGEING_SECONDS,
        propose: Propose[State] | None = None,
        count_steps: CountSteps[State] | None = None,
        swapper: Swapper | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._cache = cache
        # Each running sequence must be able to decode in every step.
        self._max_sequences = min(max_sequences, max_batch_tokens)
        self._ageing_seconds = ageing_seconds
        self._propose, self._count_steps, self._swapper = propose, count_steps, swapper
        self._clock = clock
        self._budget = TokenBudget(max_batch_tokens, target_seconds=target_seconds, min_chunk=cache.page_size)
        self._windowed = any(window is not None for window in cache.windows)
        self._numbers = itertools.count()
        self._deadlines: Deadlines[State] = Deadlines()
        self._pages: PageSupply[State] = PageSupply(cache)
        self._stalled = self._starved = 0
        self.waiting: WaitingQueue[State] = WaitingQueue(
            max_waiting=max_waiting, max_waiting_tokens=max_waiting_tokens
        )
        self.running: list[State] = []  # by order
        self.preemptions = 0

    @property
    def allocation_failures(self) -> int:
        """How often pages, or the executor's memory, were asked for and not there."""
        return self._pages.failures

    def check_room(self, tokens: int) -> None:
        """Raises `QueueFull` where no request of that many tokens may be added."""
        self.waiting.check_room(tokens)

    def add(self, sequence: State) -> None:
        """Raises `QueueFull`."""
        self.waiting.check_room(len(sequence.tokens))
        came = self._clock() - sequence.priority * self._ageing_seconds
        sequence.order = (came, next(self._numbers))
        self._deadlines.watch(sequence)
        self.waiting.push(sequence)

    def fork(self, sequence: State, other: State) -> None:
        """`other`, whose tokens are `sequence`'s so far, begins with its pages; or waits, where as many run
        as may."""
        other.order = (sequence.order[0], next(self._numbers))
        self._deadlines.watch(other)
        if len(self.running) < self._max_sequences:
            sequence.blocks.truncate(sequence.computed)
            other.blocks, other.computed = sequence.blocks.fork(), sequence.computed
            self._run(other)
        else:
            self.waiting.push(other)

    def remove(self, sequence: State) -> None:
        """Forgets a sequence and gives its pages back; nothing happens when it is not here."""
        if sequence.is_running:
            del self.running[bisect_left(self.running, sequence.order, key=_order)]
            sequence.is_running = False
        else:
            self.waiting.discard(sequence)
        self._deadlines.discard(sequence)
        if self._swapper is not None:
            self._swapper.forget(sequence)
        sequence.follows = None
        sequence.blocks.release()

    def schedule(self) -> StepPlan[State]:
        """The next step, its pages allocated. Nothing in it: there is nothing to do, or memory must be found
        first; then the next call finds some or names who fails."""
        plan: StepPlan[State] = StepPlan()
        if len(self._deadlines):
            self._expire(plan)
        self._make_way()
        while True:
            plan.chunks = self._decodes()
            self._prefills(plan.chunks)
            if plan.chunks or len(self.running) < 2:
                break
            # Prompts in the middle of their prefill hold all pages: one has to wait.
            self._preempt()
        # Who waits for a place has none before one of these ends. Most ends end the call; one by a stop
        # string or a deadline is seen after it.
        all_taken = len(self.running) >= self._max_sequences
        if self._count_steps is not None and plan.chunks and (all_taken or not self.waiting):
            self._take_steps(plan.chunks, self._count_steps)
        if plan.chunks or not (self.running or self.waiting):
            self._stalled = 0
        else:
            self._stall(plan)
        return plan

    def advance(self, chunk: Chunk[State], count: int) -> None:
        """The chunk was run and its first `count` tokens stay. Full pages enter the prefix tree."""
        sequence, blocks = chunk.sequence, chunk.sequence.blocks
        before, size = sequence.computed, self._cache.page_size
        sequence.computed = computed = before + count
        if chunk.draft or chunk.steps > 1:
            blocks.truncate(computed)
        if computed // size > before // size:
            self._cache.insert(blocks, sequence.tokens, computed)
            if self._windowed:
                blocks.release_window(computed)

    def restart(self, sequence: State, tokens: list[int]) -> None:
        """A running sequence goes on from other tokens, in the cache as far as the prefix tree has them."""
        sequence.blocks.release()
        sequence.tokens, sequence.computed = tokens, 0
        if sequence.adopts:
            sequence.computed = self._cache.adopt(sequence.blocks, tokens)

    def observe(self, shape: StepShape, seconds: float) -> None:
        """A step was run."""
        self._starved = 0
        self._budget.observe(shape, seconds)

    def shrink(self, chunks: Sequence[Chunk[State]]) -> bool:
        """The executor found no memory for a step: the next ones are smaller, and the last in the order has
        to wait where others run. False where steps of one token find none again and again."""
        self._pages.failures += 1
        tokens = sum(chunk.count for chunk in chunks)
        self._starved = self._starved + 1 if tokens == 1 else 0
        self._budget.shrink(tokens)
        if len(self.running) > 1:
            self._preempt()
        return self._starved < _STALLED

    def _decodes(self) -> list[Chunk[State]]:
        decoding: list[State] = []
        position = context = 0
        while position < len(self.running) and len(decoding) < self._budget.cap:
            sequence = self.running[position]
            if sequence.remaining == 1:
                if not self._make_room(sequence):
                    break  # it was the last itself
                decoding.append(sequence)
                context += sequence.computed
            position += 1
        prompts = min(len(self.running) + len(self.waiting), self._max_sequences) - len(decoding)
        self._budget.start(len(decoding), context, prompts)
        if self._propose is None:
            return [Chunk(sequence, 1) for sequence in decoding]
        chunks = []
        for sequence, draft in zip(decoding, self._propose(decoding, self._budget.left), strict=True):
            # Nobody is preempted for a draft.
            if not draft or not self._pages.reserve(sequence, 1 + len(draft)):
                chunks.append(Chunk(sequence, 1))
                continue
            self._budget.take(len(draft), sequence.computed, prompt=False)
            chunks.append(Chunk(sequence, 1 + len(draft), draft))
        return chunks

    def _take_steps(self, chunks: list[Chunk[State]], count_steps: CountSteps[State]) -> None:
        if len(chunks) < len(self.running) or any(c.count > 1 or not c.completes for c in chunks):
            return
        sequences = [chunk.sequence for chunk in chunks]
        steps = count_steps(sequences)
        # Nobody is preempted for it.
        if steps > 1 and self._pages.are_there(sequences, steps):
            for chunk in chunks:
                self._pages.reserve(chunk.sequence, steps)
                chunk.steps = steps

    def _prefills(self, chunks: list[Chunk[State]]) -> None:
        for sequence in self.running:
            if self._budget.left <= 0:
                return
            if sequence.remaining > 1 and (chunk := self._prompt_chunk(sequence)):
                chunks.append(chunk)
        if self.waiting:
            self._admit(chunks)

    def _admit(self, chunks: list[Chunk[State]]) -> None:
        passed: list[State] = []
        try:
            while (
                len(self.running) < self._max_sequences
                and len(passed) < _LOOKAHEAD
                and self._budget.room(0) > 0
                and (sequence := self.waiting.peek()) is not None
            ):
                if follows_another(sequence, self.running, self._cache):
                    self.waiting.discard(sequence)
                    passed.append(sequence)
                elif not self._pages.can_start(sequence, self.running) or not self._start(sequence, chunks):
                    break
        finally:
            for sequence in passed:
                self.waiting.push(sequence)

    def _start(self, sequence: State, chunks: list[Chunk[State]]) -> bool:
        self.waiting.discard(sequence)
        self._run(sequence)
        if self._swapper is not None and self._swapper.bring_back(sequence):
            pass
        elif sequence.adopts:
            sequence.computed = self._cache.adopt(sequence.blocks, sequence.tokens)
            if not sequence.preemptions:
                sequence.hit_tokens = sequence.computed
        if chunk := self._prompt_chunk(sequence):
            chunks.append(chunk)
            return True
        self._put_back(sequence)
        return False

    def _prompt_chunk(self, sequence: State) -> Chunk[State] | None:
        if sequence.adopts:
            sequence.computed = self._cache.extend(sequence.blocks, sequence.tokens, sequence.computed)
        count = min(sequence.remaining, self._budget.room(sequence.computed))
        if sequence.chunk_limit is not None:
            count = min(count, sequence.chunk_limit)
        count = self._pages.most(sequence, count)
        if count <= 0 or not self._pages.reserve(sequence, count):
            return None
        self._budget.take(count, sequence.computed)
        return Chunk(sequence, count)

    def _make_room(self, sequence: State) -> bool:
        """A page for one more token, by preemption where there is none; False when that hit the sequence
        itself."""
        while not self._pages.reserve(sequence, 1):
            if self._preempt() is sequence:
                return False
        return True

    def _make_way(self) -> None:
        """The last running ones give way to a waiting one of a higher class that finds no place."""
        head = self.waiting.peek() if self.running else None
        while (
            head is not None
            and self.running
            and (last := self.running[-1]).priority < head.priority
            and last.order > head.order
            and not follows_another(head, self.running, self._cache)
            and not (len(self.running) < self._max_sequences and self._pages.can_start(head, self.running))
        ):
            self._preempt()

    def _preempt(self) -> State:
        last = self.running[-1]
        self.preemptions += 1
        last.preemptions += 1
        if self._swapper is not None and last.computed:
            self._swapper.keep(last, self._budget.compute_seconds(last.computed))
        self._put_back(last)
        return last

    def _put_back(self, sequence: State) -> None:
        del self.running[bisect_left(self.running, sequence.order, key=_order)]
        sequence.is_running = False
        sequence.blocks.release()  # what is full of it is in the prefix tree
        sequence.computed = 0
        self.waiting.push(sequence)

    def _run(self, sequence: State) -> None:
        sequence.is_running = True
        insort(self.running, sequence, key=_order)

    def _expire(self, plan: StepPlan[State]) -> None:
        now = self._clock()
        while (sequence := self._deadlines.take_expired(now)) is not None:
            state = "running" if sequence.is_running else "waiting"
            self.remove(sequence)
            late = now - (sequence.deadline or now)
            reason = f"the request's deadline passed {late:.3f} s ago while it was {state}"
            plan.failed.append((sequence, DeadlineExceeded(reason)))

    def _stall(self, plan: StepPlan[State]) -> None:
        self._stalled += 1
        first = self.running[0] if self.running else self.waiting.peek()
        if self._stalled < _STALLED or first is None:
            return
        self._stalled = 0
        self.remove(first)
        reason = (
            f"the request's {len(first.tokens)} tokens find no pages of the KV cache: of "
            f"{self._cache.num_blocks} pages {self._cache.pages_available} are free, "
            f"{self._cache.pages_pinned} pinned"
        )
        plan.failed.append((first, DoesNotFitError(reason)))
