"""From a chunk's logits to tokens and log-probabilities."""

from collections.abc import Sequence as Listed
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import ExecutorError
from .executor import NO_NUMBERS, NONE_LEFT
from .outputs import Logprob
from .sampler import log_softmax, top_logprobs
from .sequence import Sequence
from .sequence_state import Chunk
from .speculation import Speculator
from .statistics import StatisticsRecorder


class Rows(NamedTuple):
    """What the executor gave for a chunk: logits [rows, vocab] float32, and where each row has its highest,
    if that is known."""

    logits: NDArray[np.float32]
    best: Listed[int] | None


def choose_tokens(
    chunk: Chunk[Sequence],
    rows: Rows,
    recorder: StatisticsRecorder,
    now: float,
    speculator: Speculator | None = None,
) -> int:
    """Appends the next token, and where the chunk has a draft one after each token of it that was right:
    every position is sampled, in order, as without one. There are 1 + draft `rows`. Returns how many of the
    chunk's tokens stay."""
    sequence, draft = chunk.sequence, chunk.draft
    right = 0
    for i, row in enumerate(rows.logits):
        token = _choose(sequence, row, None if rows.best is None else rows.best[i], recorder, now)
        if sequence.ended or right == len(draft) or token != draft[right]:
            break
        right += 1
    if draft and speculator is not None:
        recorder.accepted_tokens += right
        speculator.observe(sequence, len(draft), right)
    return chunk.count - len(draft) + right


def take_tokens(
    chunk: Chunk[Sequence], tokens: Listed[int], times: Listed[float], recorder: StatisticsRecorder
) -> int:
    """Appends the tokens that an executor's decode chose in each of its steps, as far as the answer goes.
    Returns how many of the chunk's tokens stay. Raises `ExecutorError` where a row left none to choose."""
    sequence, kept = chunk.sequence, 0
    assert sequence.chooser is not None
    for token, time in zip(tokens, times, strict=True):
        if token == NO_NUMBERS:
            raise ExecutorError(
                f"the model's highest logit at position {sequence.position} is no number; expected one"
            )
        if token == NONE_LEFT:
            raise ExecutorError(f"no token can be chosen at position {sequence.position}: all are banned")
        sequence.chooser.accept(token)
        recorder.token(sequence, time)
        sequence.append(token, None, time)
        kept += 1
        if sequence.ended:
            break
    return kept


def _choose(
    sequence: Sequence, row: NDArray[np.float32], best: int | None, recorder: StatisticsRecorder, now: float
) -> int:
    assert sequence.chooser is not None
    request = sequence.request
    token = sequence.chooser.choose(row, sequence.position, best)
    sequence.chooser.accept(token)
    logprobs = None
    if (wanted := request.params.logprobs) is not None:
        logprobs = {
            i: Logprob(value, rank, sequence.tokenizer.token_text(i))
            for i, (value, rank) in top_logprobs(row, token, wanted).items()
        }
    if request.samples > request.params.n:
        value = log_softmax(row)[token] if logprobs is None else logprobs[token].logprob
        sequence.cumulative_logprob += float(value)
    recorder.token(sequence, now)
    sequence.append(token, logprobs, now, last=sequence.chooser.ended)
    return token


def score_tokens(chunk: Chunk[Sequence], rows: Rows) -> None:
    """Adds the log-probability of the token after each of the chunk's that has a next one."""
    sequence, start = chunk.sequence, chunk.sequence.computed
    del sequence.scores[start:]  # of before it was preempted
    for row, token in zip(rows.logits, sequence.tokens[start + 1 :], strict=False):
        value = float(log_softmax(row)[token])
        if not np.isfinite(value):
            raise ExecutorError(f"the log-probability of token {token} is {value}; expected a number")
        sequence.scores.append(value)
    if chunk.completes:
        sequence.complete_score()
