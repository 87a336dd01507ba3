"""`SequenceState`: what the scheduler knows of a sequence. `Chunk`: the part of it that runs in a step."""

from collections.abc import Sequence
from typing import Generic, TypeVar

from ..kvcache import SequenceBlocks
from .step_time import StepShape, token_pairs


class SequenceState:
    """A sequence's tokens and pages, and how urgent it is.

    `priority` is its class, 0 by default, a higher one more urgent. `deadline` is when it must have ended,
    on the scheduler's clock. `chunk_limit` is the most of its tokens in a step. `adopts` says whether tokens
    that others computed will do: not where every token's logits are wanted.
    """

    def __init__(
        self,
        tokens: list[int],
        blocks: SequenceBlocks,
        *,
        priority: int = 0,
        deadline: float | None = None,
        chunk_limit: int | None = None,
        adopts: bool = True,
    ) -> None:
        self.tokens = tokens  # prompt and answer, as the model sees them
        self.blocks = blocks
        self.computed = 0  # how many of the tokens are in the cache
        self.priority = priority
        self.deadline = deadline
        self.chunk_limit = chunk_limit
        self.adopts = adopts
        # The scheduler's: least comes first. When it came, moved by its class, and a number of its own.
        self.order: tuple[float, int] = (0.0, 0)
        self.is_running = False
        self.hit_tokens = 0  # that others had computed when it first started
        self.preemptions = 0
        # A sequence that is computing a prefix of this one's tokens, and how many they have in common.
        self.follows: tuple[SequenceState, int] | None = None

    @property
    def remaining(self) -> int:
        """Tokens that are not in the cache yet; 1 while decoding."""
        return len(self.tokens) - self.computed


State = TypeVar("State", bound=SequenceState)


class Chunk(Generic[State]):
    """A sequence's tokens for one step: those from its `computed` on, then a draft of those that may follow.
    Their pages are there. `completes` says whether the sequence's last token is among them, so that the next
    one can be chosen. `steps`, where it is more than one: so many tokens may be chosen and computed one after
    another in a call, for which there are pages, too."""

    __slots__ = ("completes", "count", "draft", "sequence", "steps")

    def __init__(self, sequence: State, count: int, draft: Sequence[int] = ()) -> None:
        self.sequence = sequence
        self.count = count  # the draft's tokens included
        self.draft = draft
        self.steps = 1
        self.completes = count - len(draft) == len(sequence.tokens) - sequence.computed

    @property
    def tokens(self) -> list[int]:
        computed = self.sequence.computed
        tokens = self.sequence.tokens[computed : computed + self.count]
        return [*tokens, *self.draft] if self.draft else tokens


def shape_of(chunks: Sequence[Chunk[State]]) -> StepShape:
    """What a step with these chunks computes; before it is run."""
    decodes = context = prefill = pairs = prefills = drafted = 0
    for chunk in chunks:
        computed, extra = chunk.sequence.computed, len(chunk.draft)
        if chunk.completes and chunk.count - extra == 1:
            decodes += 1
            context += computed
            if extra:
                drafted += extra
                pairs += token_pairs(extra, computed)
        else:
            prefills += 1
            prefill += chunk.count
            pairs += token_pairs(chunk.count, computed)
    return StepShape(decodes, context, prefill, pairs, prefills, drafted)
