"""`Request`, what was asked for, and `Sequence`, how far it has come."""

import secrets
import time
from collections import deque
from dataclasses import dataclass, field

from ..errors import NybbleError
from ..kvcache import SequenceBlocks
from .detokenizer import IncrementalDetokenizer, StopStrings
from .outputs import CompletionOutput, FinishReason, Logprob, Piece, RequestOutput, Timings
from .sampling_params import SamplingParams
from .token_chooser import TokenChooser
from .tokenizer import Tokenizer


@dataclass(frozen=True, eq=False)
class Request:
    """One prompt and its settings. Without a seed in `params` one is drawn here. `score` asks for the
    prompt's log-probabilities and no answer."""

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    prompt: str | None = None
    score: bool = False
    seed: int = -1

    def __post_init__(self) -> None:
        if self.seed < 0:
            drawn = secrets.randbits(64) if self.params.seed is None else self.params.seed
            object.__setattr__(self, "seed", drawn)


class Sequence:
    """A request in the engine: its tokens, its pages, its answer so far."""

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer,
        blocks: SequenceBlocks,
        *,
        max_tokens: int,
        stop_ids: frozenset[int],
        chooser: TokenChooser | None = None,
    ) -> None:
        self.request = request
        self.blocks = blocks
        self.tokens = list(request.prompt_ids)  # prompt and answer
        self.computed = 0  # how many of them are in the cache
        self.max_tokens = max_tokens  # of the answer, bounded by the context
        self.stop_ids = stop_ids
        self.chooser = chooser
        self.scores: list[float] = []
        self.pieces: deque[Piece] = deque()
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: NybbleError | None = None
        self._text: list[str] = []
        self._shown = 0  # parts of it that pieces carry
        self._logprobs: list[dict[int, Logprob]] = []
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._stops = StopStrings(request.params.stop_strings)
        self._added = time.perf_counter()
        self._first: float | None = None
        self._ended: float | None = None

    @property
    def remaining(self) -> int:
        """Tokens that are not in the cache yet; 1 while decoding."""
        return len(self.tokens) - self.computed

    @property
    def position(self) -> int:
        """Where the next token is in the text."""
        return len(self.tokens)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - len(self.request.prompt_ids)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def append(self, token: int, logprobs: dict[int, Logprob] | None, *, last: bool = False) -> None:
        """Takes the next token, and finishes when it is the last one: `last`, a stop token, completes a stop
        string, or `max_tokens` are there."""
        now = time.perf_counter()
        self._first = now if self._first is None else self._first
        self.tokens.append(token)
        if logprobs is not None:
            self._logprobs.append(logprobs)
        if token in self.stop_ids:
            # A stop string in what was held back comes before the stop token.
            self._show(self._detokenizer.finish())
            if not self.finished:
                self._finish("stop", token if token in self.request.params.stop_token_ids else None)
        else:
            self._show(self._detokenizer.push(token))
            if not self.finished and (last or self.num_output >= self.max_tokens):
                self._show(self._detokenizer.finish())
                if not self.finished:
                    self._finish("stop" if last else "length", None)
        text = "".join(self._text[self._shown :])
        self._shown = len(self._text)
        self.pieces.append(Piece(text, token, self.finish_reason))

    def abort(self) -> None:
        """Ends it where it is. What it has said stays readable."""
        if not self.finished:
            self._show(self._detokenizer.finish())
            self._finish("abort", None)

    def fail(self, error: NybbleError) -> None:
        if not self.finished:
            self.error = error
            self._ended = time.perf_counter()

    def complete_score(self) -> None:
        self._finish("length", None)

    def output(self) -> RequestOutput:
        """The answer so far."""
        completion = CompletionOutput(
            index=0,
            text="".join(self._text),
            token_ids=tuple(self.tokens[len(self.request.prompt_ids) :]),
            logprobs=None if self.request.params.logprobs is None else tuple(self._logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )
        ended = time.perf_counter() if self._ended is None else self._ended
        timings = Timings(
            prompt_tokens=len(self.request.prompt_ids),
            output_tokens=self.num_output,
            time_to_first_token=None if self._first is None else self._first - self._added,
            total=ended - self._added,
        )
        return RequestOutput(
            self.request.id, self.request.prompt, self.request.prompt_ids, (completion,), timings
        )

    def _show(self, text: str) -> None:
        look = self.num_output >= self.request.params.min_tokens
        self._text.append(self._stops.push(text, look=look))
        if self._stops.found is not None:
            self._finish("stop", self._stops.found)

    def _finish(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        self._text.append(self._stops.finish())
        self.finish_reason, self.stop_reason = reason, stop_reason
        self._ended = time.perf_counter()
