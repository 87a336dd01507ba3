"""What a request gives back."""

from typing import Literal

from ..records import dataclass

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Logprob:
    """A token's natural log-probability at its position, and its rank there, 1 for the most likely."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True)
class Timings:
    """Counts in tokens, times in seconds from the moment the request was added. `prompt_tokens` are the
    prompt's, `cached_tokens` those of them that others had computed; `output_tokens` the answers', stop
    tokens included."""

    prompt_tokens: int
    output_tokens: int
    time_to_first_token: float | None  # None when there was none
    total: float
    cached_tokens: int = 0

    @property
    def tokens_per_second(self) -> float:
        """The rate at which tokens came after the first one; of a single token, over its whole time. 0
        without tokens."""
        if self.time_to_first_token is None or self.total <= 0:
            return 0.0
        after = self.total - self.time_to_first_token
        if self.output_tokens == 1 or after <= 0:
            return self.output_tokens / self.total
        return (self.output_tokens - 1) / after

    @property
    def prompt_tokens_per_second(self) -> float:
        """Prompt tokens over the time to the first token, waiting included."""
        return self.prompt_tokens / self.time_to_first_token if self.time_to_first_token else 0.0


@dataclass(frozen=True)
class CompletionOutput:
    """One answer. `finish_reason` is "stop" (a stop token or string), "length" (`max_tokens` or the
    context's end) or "abort"; `stop_reason` is the stop string, or the id from `stop_token_ids`, that ended
    it, and None for the model's own end token. `token_ids` hold the stop token; `text` never does, nor the
    stop string."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[dict[int, Logprob], ...] | None  # one dict a token; None unless asked for
    finish_reason: FinishReason | None
    stop_reason: int | str | None


@dataclass(frozen=True)
class RequestOutput:
    """A request with its answers; the first one's fields can be read here too."""

    request_id: str
    prompt: str | None  # None when the prompt was given as token ids or as messages
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    timings: Timings
    dropped_messages: int = 0  # of a conversation that has outgrown the context, its oldest

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.outputs[0].token_ids

    @property
    def logprobs(self) -> tuple[dict[int, Logprob], ...] | None:
        return self.outputs[0].logprobs

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.outputs[0].finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        return self.outputs[0].stop_reason


@dataclass(frozen=True)
class Piece:
    """One streamed token. `text` is what became certain with it: empty while a character or a possible stop
    string is incomplete. The pieces' texts together are the answer's text, their token ids its token
    ids; `index` says which one, where a request has several."""

    text: str
    token_id: int
    finish_reason: FinishReason | None = None  # set on the last piece
    index: int = 0


@dataclass(frozen=True)
class TextScore:
    """Natural log-probabilities of a text's tokens given those before them. The first has none: nothing
    precedes it."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]

    @property
    def total(self) -> float:
        """The text's log-probability after its first token."""
        return sum(x for x in self.logprobs if x is not None)
