"""`Scheduler`: what runs in the next step."""

from collections import deque
from dataclasses import dataclass

from ..kvcache import KvCache, pages_for
from .sequence import Sequence


@dataclass(frozen=True)
class Chunk:
    """A sequence's tokens for one step: those from its `computed` on. Their pages are there."""

    sequence: Sequence
    count: int

    @property
    def tokens(self) -> list[int]:
        computed = self.sequence.computed
        return self.sequence.tokens[computed : computed + self.count]

    @property
    def completes(self) -> bool:
        """Whether the sequence's last token is among them, so that the next one can be chosen."""
        return self.count == self.sequence.remaining


class Scheduler:
    """First come, first served, within a budget of tokens a step: sequences that decode come first, one
    token each, and chunks of prompts fill what is left (https://arxiv.org/abs/2401.08671).

    Pages are taken as sequences grow. A waiting sequence starts once there are pages for all its tokens;
    when a running one finds none, the youngest gives its pages up, waits in front, and is computed again
    later.
    """

    def __init__(
        self,
        cache: KvCache,
        *,
        max_batch_tokens: int,
        max_sequences: int,
        max_score_tokens: int,
    ) -> None:
        self._cache = cache
        self._page_size = cache.page_size
        self._max_batch_tokens = max_batch_tokens
        # Each running sequence must be able to decode in every step.
        self._max_sequences = min(max_sequences, max_batch_tokens)
        self._max_score_tokens = max_score_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forgets a sequence and gives its pages back; nothing happens when it is not here."""
        for queue in (self.running, self.waiting):
            if sequence in queue:
                queue.remove(sequence)
        sequence.blocks.release()

    def schedule(self) -> list[Chunk]:
        """The next step's chunks, with their pages allocated; empty only when there is nothing to do."""
        while True:
            chunks = self._decodes()
            chunks += self._prefills(self._max_batch_tokens - len(chunks))
            if chunks or len(self.running) < 2:
                return chunks
            # Prompts in the middle of their prefill hold all pages: one has to wait.
            self._preempt()

    def _decodes(self) -> list[Chunk]:
        chunks = []
        position = 0
        while position < len(self.running):
            sequence = self.running[position]
            if sequence.remaining == 1:
                if not self._make_room(sequence):
                    break  # it was the youngest itself
                _reserve(sequence, 1)
                chunks.append(Chunk(sequence, 1))
            position += 1
        return chunks

    def _prefills(self, budget: int) -> list[Chunk]:
        chunks = []
        for sequence in self.running:
            if sequence.remaining > 1 and (chunk := self._chunk(sequence, budget)):
                chunks.append(chunk)
                budget -= chunk.count
        while budget > 0 and self.waiting and len(self.running) < self._max_sequences:
            sequence = self.waiting[0]
            if self._free_pages() < self._pages_missing(sequence):
                break
            self.running.append(self.waiting.popleft())
            if chunk := self._chunk(sequence, budget):
                chunks.append(chunk)
                budget -= chunk.count
        return chunks

    def _chunk(self, sequence: Sequence, budget: int) -> Chunk | None:
        room = (sequence.blocks.num_pages + self._free_pages()) * self._page_size - sequence.computed
        count = min(sequence.remaining, budget, room)
        if sequence.request.score:
            count = min(count, self._max_score_tokens)
        if count <= 0:
            return None
        _reserve(sequence, count)
        return Chunk(sequence, count)

    def _make_room(self, sequence: Sequence) -> bool:
        """Frees pages for one more token by preempting the youngest; False when that was this sequence."""
        while (missing := self._pages_missing(sequence)) and missing > self._free_pages():
            if self._preempt() is sequence:
                return False
        return True

    def _preempt(self) -> Sequence:
        youngest = self.running.pop()
        youngest.blocks.release()
        youngest.computed = 0
        self.waiting.appendleft(youngest)
        return youngest

    def _free_pages(self) -> int:
        return self._cache.pages_available

    def _pages_missing(self, sequence: Sequence) -> int:
        return max(0, pages_for(len(sequence.tokens), self._page_size) - sequence.blocks.num_pages)


def _reserve(sequence: Sequence, count: int) -> None:
    """Pages for the next tokens. A step that was interrupted has reserved some of them already."""
    sequence.blocks.append(max(0, sequence.computed + count - sequence.blocks.num_tokens))
