"""From a row of logits to a token. The vocabulary is never sorted, and the random numbers depend on the
request alone."""

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from ..errors import ExecutorError
from .sampling_params import ResolvedSampling

Logits = NDArray[np.float32]
_MASK64 = (1 << 64) - 1


def sample(
    logits: Logits,
    sampling: ResolvedSampling,
    *,
    seed: int,
    index: int,
    position: int,
    seen: NDArray[np.int64] | None = None,
    banned: Collection[int] = (),
) -> int:
    """The token chosen from one row, `logits` [vocab] float32, which is not changed.

    `seen` are the tokens the repetition penalty applies to, each once; `banned` ones cannot be chosen. Ties
    go to the lowest token id. The random number is the one of (seed, sample index, position). Raises
    `ExecutorError` when a logit is NaN or the highest is infinite.
    """
    best = int(np.argmax(logits))  # NaN counts as the highest
    if not np.isfinite(logits[best]):
        raise ExecutorError(
            f"the model's logits at position {position} hold {logits[best]}; expected numbers"
        )
    penalty = sampling.repetition_penalty
    if len(banned) or (penalty != 1.0 and seen is not None and len(seen)):
        logits = logits.copy()
        if penalty != 1.0 and seen is not None:
            chosen = logits[seen]
            logits[seen] = np.where(chosen < 0, chosen * np.float32(penalty), chosen / np.float32(penalty))
        logits[list(banned)] = -np.inf
        best = int(np.argmax(logits))
    if sampling.temperature == 0.0:
        return best
    ids, weights = candidates(logits, sampling)
    return int(ids[_draw(weights, uniform(seed, index, position))])


def candidates(logits: Logits, sampling: ResolvedSampling) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The tokens that temperature, top_k, top_p and min_p leave, in that order as transformers and vLLM
    apply them: ids ascending [n], and their probabilities [n] float64, which sum to 1. At least one is
    left."""
    scaled = logits.astype(np.float64) / sampling.temperature
    ids = np.arange(scaled.size)
    if 0 < sampling.top_k < scaled.size:
        # Tokens tied with the k-th stay, so that the set does not depend on how ties are ordered.
        kth = np.partition(scaled, -sampling.top_k)[-sampling.top_k]
        ids = np.flatnonzero(scaled >= kth)
    weights = np.exp(scaled[ids] - scaled.max())
    weights /= weights.sum()
    if sampling.top_p < 1.0:
        keep = _nucleus(weights, sampling.top_p)
        ids, weights = ids[keep], weights[keep]
    if sampling.min_p > 0.0:
        keep = np.flatnonzero(weights >= sampling.min_p * weights.max())
        ids, weights = ids[keep], weights[keep]
    return ids, weights / weights.sum()


def _nucleus(weights: NDArray[np.float64], share: float) -> NDArray[np.int64]:
    """Indices, ascending, of the fewest largest weights that sum to at least `share`; ties go to the
    lowest."""
    size = weights.size
    count = min(64, size)
    while True:
        if count < size:
            edge = np.partition(weights, size - count)[size - count]
            top = np.flatnonzero(weights >= edge)
        else:
            top = np.arange(size)
        order = top[np.argsort(-weights[top], kind="stable")]
        total = np.cumsum(weights[order])
        if total[-1] >= share or count == size:
            return np.sort(order[: int(np.searchsorted(total, share)) + 1])
        count = min(count * 8, size)


def _draw(weights: NDArray[np.float64], number: float) -> int:
    total = np.cumsum(weights)
    # Never a token of weight 0: the first whose running total passes the number.
    return min(
        int(np.searchsorted(total, number * total[-1], side="right")), int(np.flatnonzero(weights)[-1])
    )


def uniform(seed: int, index: int, position: int) -> float:
    """The random number of one sampled token, in [0, 1): 53 bits of Philox-4x64
    (https://doi.org/10.1145/2063384.2063405) with the seed as key and (sample index, position) in the
    counter. Nothing is carried from draw to draw."""
    counter = np.array([0, 0, index, position], np.uint64)
    bits = int(np.random.Philox(key=seed & _MASK64, counter=counter).random_raw())
    return (bits >> 11) * 2.0**-53


def log_softmax(logits: Logits) -> NDArray[np.float64]:
    """Log-probabilities over the last axis, float64."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def top_logprobs(logits: Logits, chosen: int, count: int) -> dict[int, tuple[float, int]]:
    """Log-probability and rank (from 1) of the chosen token and of the `count` most likely ones, by token
    id, most likely first with the chosen one in front. Ties rank by token id. `logits` is [vocab]
    float32."""
    logprobs = log_softmax(logits)
    count = min(count, logprobs.size)
    result = {chosen: (float(logprobs[chosen]), _rank(logprobs, chosen))}
    if count == 0:
        return result
    edge = np.partition(logprobs, logprobs.size - count)[logprobs.size - count]
    top = np.flatnonzero(logprobs >= edge)
    order = top[np.argsort(-logprobs[top], kind="stable")][:count]
    for rank, token in enumerate(order.tolist(), start=1):
        result.setdefault(token, (float(logprobs[token]), rank))
    return result


def _rank(logprobs: NDArray[np.float64], token: int) -> int:
    above = int((logprobs > logprobs[token]).sum())
    return 1 + above + int((logprobs[:token] == logprobs[token]).sum())
