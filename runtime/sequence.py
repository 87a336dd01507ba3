"""`Request`, what was asked for, and `Sequence`, how far one answer to it has come."""

import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import field
from typing import Literal

from ..errors import NybbleError
from ..kvcache import SequenceBlocks
from ..records import dataclass
from .detokenizer import StopStrings, detokenizer
from .outputs import CompletionOutput, FinishReason, Logprob, Piece, RequestOutput, Timings
from .sampler import TokenRule
from .sampling_params import SamplingParams
from .sequence_state import SequenceState
from .token_chooser import TokenChooser
from .tokenizer import Tokenizer

OnContextEnd = Literal["stop", "error", "slide"]


@dataclass(frozen=True, eq=False)
class Request:
    """One prompt and its settings. Without a seed in `params` one is drawn here.

    - `score` asks for the prompt's log-probabilities and no answer.
    - `priority`: a class, a higher one more urgent; waiting makes up for a lower one.
    - `deadline`: seconds from when it is added, after which it fails with `DeadlineExceeded`.
    - `on_context_end`: what happens to an answer that comes to the end of the context. "stop" ends it;
      "error" refuses a request that might come there; "slide" goes on from the prompt's first `n_keep` tokens
      and the last ones, half of what there is room for besides.
    """

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    prompt: str | None = None
    score: bool = False
    seed: int = -1
    priority: int = 0
    deadline: float | None = None
    on_context_end: OnContextEnd = "stop"
    n_keep: int = 0

    def __post_init__(self) -> None:
        if self.seed < 0:
            drawn = int.from_bytes(os.urandom(8), "little") if self.params.seed is None else self.params.seed
            object.__setattr__(self, "seed", drawn)

    @property
    def samples(self) -> int:
        """How many answers are made."""
        return self.params.best_of or self.params.n


class Sequence(SequenceState):
    """One answer to a request: its tokens, its pages, what it says so far. The first one stands for the
    request; the others, if it asks for several, are forked from it when the prompt has been computed."""

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer,
        blocks: SequenceBlocks,
        *,
        max_tokens: int,
        stop_ids: frozenset[int],
        chooser: TokenChooser | None = None,
        first: "Sequence | None" = None,
        index: int = 0,
        chunk_limit: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        added: float = clock() if first is None else first.added
        super().__init__(
            list(request.prompt_ids),
            blocks,
            priority=request.priority,
            deadline=None if request.deadline is None else added + request.deadline,
            chunk_limit=chunk_limit if request.score else None,
            adopts=not request.score,
        )
        self.request = request
        self.index = index  # among the request's answers
        self.max_tokens = max_tokens  # of the answer
        self.stop_ids = stop_ids
        self.chooser = chooser
        self.output_ids: list[int] = []
        self.cumulative_logprob = 0.0  # of the answer; only where answers are ranked by it
        self.scores: list[float] = []
        # Those of all the request's answers.
        self.pieces: deque[Piece] = deque() if first is None else first.pieces
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: NybbleError | None = None  # the first answer's is the request's
        self.ended = False  # whether this answer has
        self.added: float = added
        self.last_token_at: float | None = None
        self._first = first
        self._others: list[Sequence] = []  # the first one's
        self.tokenizer = tokenizer
        self._clock = clock
        self._text: list[str] = []
        self._shown = 0  # parts of it that pieces carry
        self._logprobs: list[dict[int, Logprob]] = []
        self._detokenizer = detokenizer(tokenizer)
        self._stops = StopStrings(request.params.stop_strings)
        self._first_token_at: float | None = None
        self._ended_at: float | None = None

    @property
    def num_output(self) -> int:
        return len(self.output_ids)

    @property
    def position(self) -> int:
        """Where the next token is in the text, whatever the model still sees of that."""
        return len(self.request.prompt_ids) + len(self.output_ids)

    @property
    def has_rule(self) -> bool:
        """Whether `rule` says all that is done with the next rows of logits."""
        request, params = self.request, self.request.params
        if self.chooser is None or not self.chooser.has_rule or request.score:
            return False
        return params.logprobs is None and request.samples == params.n

    @property
    def best_only(self) -> bool:
        """Whether of the next rows of logits only the highest counts, and where it is."""
        return self.has_rule and self.chooser is not None and self.chooser.best_only

    def rule(self) -> TokenRule:
        """How the answer's next tokens are chosen."""
        assert self.chooser is not None
        return self.chooser.rule(self.position)

    @property
    def first(self) -> "Sequence":
        """The request's first answer."""
        return self if self._first is None else self._first

    @property
    def samples(self) -> "list[Sequence]":
        """All answers to the request so far."""
        return [self.first, *self.first._others]

    @property
    def finished(self) -> bool:
        """Whether all answers to the request have ended."""
        first = self.first
        return first.ended and all(other.ended for other in first._others)

    def fork(self, index: int, blocks: SequenceBlocks) -> "Sequence":
        """Another answer to the request, of which this is the first and has no token yet."""
        other = Sequence(
            self.request,
            self.tokenizer,
            blocks,
            max_tokens=self.max_tokens,
            stop_ids=self.stop_ids,
            chooser=None if self.chooser is None else self.chooser.fork(index),
            first=self,
            index=index,
            clock=self._clock,
        )
        other.hit_tokens = self.hit_tokens
        self._others.append(other)
        return other

    def append(
        self,
        token: int,
        logprobs: dict[int, Logprob] | None,
        now: float | None = None,
        *,
        last: bool = False,
    ) -> None:
        """Takes the next token, chosen at `now`, and finishes when it is the last one: `last`, a stop token,
        completes a stop string, or `max_tokens` are there."""
        self.last_token_at = self._clock() if now is None else now
        if self._first_token_at is None:
            self._first_token_at = self.last_token_at
        self.tokens.append(token)
        self.output_ids.append(token)
        if logprobs is not None:
            self._logprobs.append(logprobs)
        if token in self.stop_ids:
            # A stop string in what was held back comes before the stop token.
            self._show(self._detokenizer.finish())
            if not self.ended:
                self._finish("stop", token if token in self.request.params.stop_token_ids else None)
        else:
            self._show(self._detokenizer.push(token))
            if not self.ended and (last or self.num_output >= self.max_tokens):
                self._show(self._detokenizer.finish())
                if not self.ended:
                    self._finish("stop" if last else "length", None)
        text = "".join(self._text[self._shown :])
        self._shown = len(self._text)
        self.pieces.append(Piece(text, token, self.finish_reason, self.index))

    def abort(self) -> None:
        """Ends it where it is. What it has said stays readable."""
        if not self.ended:
            self._show(self._detokenizer.finish())
            self._finish("abort", None)

    def fail(self, error: NybbleError) -> None:
        if not self.ended:
            self.error, self.ended = error, True
            self._ended_at = self._clock()

    def complete_score(self) -> None:
        self._finish("length", None)

    @property
    def timings(self) -> Timings:
        """The request's, so far."""
        samples = self.samples
        starts = [s._first_token_at for s in samples if s._first_token_at is not None]
        ends = [s._ended_at for s in samples if s._ended_at is not None]
        ended = max(ends) if len(ends) == len(samples) else self._clock()
        return Timings(
            prompt_tokens=len(self.request.prompt_ids),
            output_tokens=sum(s.num_output for s in samples),
            time_to_first_token=min(starts) - self.added if starts else None,
            total=ended - self.added,
            cached_tokens=self.first.hit_tokens,
        )

    def output(self) -> RequestOutput:
        """The request's answers so far: where more are made than asked for, the most likely first."""
        request, samples = self.request, self.samples
        if request.samples > request.params.n:
            samples = sorted(samples, key=lambda s: -s.cumulative_logprob)[: request.params.n]
        completions = tuple(s._completion(index) for index, s in enumerate(samples))
        return RequestOutput(request.id, request.prompt, request.prompt_ids, completions, self.timings)

    def _completion(self, index: int) -> CompletionOutput:
        return CompletionOutput(
            index=index,
            text="".join(self._text),
            token_ids=tuple(self.output_ids),
            logprobs=None if self.request.params.logprobs is None else tuple(self._logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def _show(self, text: str) -> None:
        look = self.num_output >= self.request.params.min_tokens
        self._text.append(self._stops.push(text, look=look))
        if self._stops.found is not None:
            self._finish("stop", self._stops.found)

    def _finish(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        self._text.append(self._stops.finish())
        self.finish_reason, self.stop_reason, self.ended = reason, stop_reason, True
        self._ended_at = self._clock()
