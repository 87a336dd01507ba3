"""`TokenBudget`: how many tokens of prompts a step may take while answers are being made."""

from .step_time import StepShape, StepTimeModel

# Without a target, a step that a prompt shares may take this many times one without it, which gives prompts
# more than half of the time; and more, where more prompts than answers could go on: a decode reads all
# weights for few answers or many, so it pays to have many soon.
DEFAULT_RATIO = 2.95
# While nothing was measured.
FIRST_CHUNK = 32
# Calls of the executor that find memory before larger steps are tried again.
CALM = 32


class TokenBudget:
    """At most `max_tokens` a step, all of them for prompts while no answer is being made. When prompts share
    a step with decodes, they take as much as a target for the step's time leaves, in which `target_seconds`
    is what the user asked for, and always at least `min_chunk` tokens, so that they come to an end."""

    def __init__(self, max_tokens: int, *, target_seconds: float | None = None, min_chunk: int = 16) -> None:
        self.max_tokens = max_tokens
        self.target_seconds = target_seconds
        self._min_chunk = min_chunk
        self._model = StepTimeModel()
        self._left = max_tokens
        self._seconds: float | None = None  # what is left of the target; None: no limit
        self._decodes, self._context, self._eager = 0, 0, 1
        self._prompts, self._asked = 0, False
        self._cap = max_tokens  # lowered while memory is short
        self._calm = 0  # calls since then

    def start(self, decodes: int, context: int, prompts: int = 1) -> None:
        """A step begins with `decodes` tokens of answers, which have `context` tokens in the cache together;
        `prompts` others could run beside them."""
        self._left = self._cap - decodes
        self._decodes, self._context, self._eager = decodes, context, prompts
        self._prompts, self._asked = 0, False

    @property
    def left(self) -> int:
        """Tokens that may still be added, whatever they cost."""
        return self._left

    @property
    def cap(self) -> int:
        """Most tokens of a step now."""
        return self._cap

    def room(self, past: int) -> int:
        """The most tokens that a prompt with `past` tokens in the cache may add."""
        if not self._decodes or self._left <= 0:
            return max(0, self._left)
        if not self._asked:
            self._asked, self._seconds = True, self._seconds_left()
        least = 0 if self._prompts else min(self._min_chunk, self._left)
        if self._seconds is None:
            return 0 if self._prompts else max(least, min(self._left, FIRST_CHUNK))
        return max(least, self._model.prefill_tokens(self._seconds, past, self._left))

    def take(self, tokens: int, past: int, *, prompt: bool = True) -> None:
        """The step takes that many tokens more, of a prompt or of a draft."""
        self._left -= tokens
        self._prompts += prompt
        if prompt and self._asked and self._seconds is not None:
            self._seconds = max(0.0, self._seconds - self._model.prefill_seconds(tokens, past))

    def _seconds_left(self) -> float | None:
        if not self._model.knows_prefill:
            return None
        alone = self._model.decode_seconds(self._decodes, self._context)
        if self.target_seconds is not None:
            return max(0.0, self.target_seconds - alone)
        return (DEFAULT_RATIO - 1) * alone * max(1.0, self._eager / self._decodes) if alone else None

    def compute_seconds(self, tokens: int) -> float:
        """What it takes to compute a text of so many tokens, from the steps so far; 0 where none tells."""
        return self._model.prefill_seconds(tokens, 0)

    def observe(self, shape: StepShape, seconds: float) -> None:
        """A step was run."""
        self._model.observe(shape, seconds)
        if self._cap < self.max_tokens:
            self._calm += 1
            if self._calm >= CALM:
                self._cap, self._calm = min(self.max_tokens, 2 * self._cap), 0

    def shrink(self, tokens: int) -> None:
        """A step of that many tokens found no memory: the next ones have half as many, then grow again."""
        self._cap, self._calm = max(1, min(self._cap, tokens // 2)), 0
