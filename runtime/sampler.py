"""From a row of logits to a token. The vocabulary is never sorted, and the random numbers depend on the
request alone."""

import math
from collections.abc import Callable, Collection
from functools import cache

import numpy as np
from numpy.typing import NDArray

from ..devices.kernels import choose_isa
from ..errors import ExecutorError
from ..records import dataclass
from .sampling_params import ResolvedSampling

Logits = NDArray[np.float32]
Tokens = NDArray[np.int32]
_MASK64 = (1 << 64) - 1


@dataclass(frozen=True, eq=False)
class Changes:
    """What is done to a row before a token is chosen from it, besides the repetition penalty. A token is in
    `bias` and in `counts` at most once."""

    bias: tuple[Tokens, Logits] | None = None  # tokens [n], what is added to each
    counts: tuple[Tokens, Logits] | None = None  # tokens of the answer [n], how often they are there
    allowed: NDArray[np.bool_] | None = None  # [vocab] what the constraint lets follow


@dataclass(frozen=True, eq=False)
class TokenRule:
    """How an answer's next tokens are chosen, for an executor that does so itself: each as `sample` chooses
    it from its row, the first one at `position`, the others at those after it. What was chosen joins `seen`
    and the counts, where the settings have penalties for it; None of these is none so far."""

    sampling: ResolvedSampling
    seed: int
    index: int
    position: int
    seen: Tokens | None = None
    changes: Changes | None = None  # without `allowed`


# (logits, top, sampling, number) to a token; `drawer` says which.
Draw = Callable[[Logits, float, ResolvedSampling, float], int]


def sample(
    logits: Logits,
    sampling: ResolvedSampling,
    *,
    seed: int,
    index: int,
    position: int,
    seen: Tokens | None = None,
    banned: Collection[int] = (),
    changes: Changes | None = None,
    best: int | None = None,
) -> int:
    """The token chosen from one row, `logits` [vocab] float32, which is not changed.

    `seen` are the tokens the repetition penalty applies to, each once; `banned` ones cannot be chosen;
    `changes` are those that the rest of a request's settings ask for. Ties go to the lowest token id. The
    random number is the one of (seed, sample index, position). `best` is where the highest logit is, if that
    is known. Raises `ExecutorError` when a logit is NaN,
    the highest is infinite, or every token is banned.
    """
    if best is None:
        best = int(np.argmax(logits))  # NaN counts as the highest
    if not math.isfinite(logits[best]):
        raise ExecutorError(
            f"the model's logits at position {position} hold {logits[best]}; expected numbers"
        )
    if sampling.repetition_penalty == 1.0:
        seen = None
    if changes is not None or len(banned) or (seen is not None and len(seen)):
        logits = _changed(logits, sampling, seen, banned, changes)
        best = int(np.argmax(logits))
        if not math.isfinite(logits[best]):
            raise ExecutorError(f"no token can be chosen at position {position}: all are banned")
    if sampling.temperature == 0.0:
        return best
    return drawer()(logits, float(logits[best]), sampling, uniform(seed, index, position))


def _changed(
    logits: Logits,
    sampling: ResolvedSampling,
    seen: Tokens | None,
    banned: Collection[int],
    changes: Changes | None,
) -> Logits:
    """A copy of the row, changed in the order that vLLM has: bias, repetition penalty, frequency and presence
    penalty. Tokens that cannot be chosen become -inf, which no order changes."""
    if changes is not None and changes.allowed is not None:
        logits = np.where(changes.allowed, logits, np.float32(-np.inf))
    else:
        logits = logits.copy()
    if changes is not None and changes.bias is not None:
        tokens, values = changes.bias
        logits[tokens] += values
    if seen is not None:
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # the caller looks
            chosen, penalty = logits[seen], np.float32(sampling.repetition_penalty)
            logits[seen] = np.where(chosen < 0, chosen * penalty, chosen / penalty)
    if changes is not None and changes.counts is not None:
        tokens, times = changes.counts
        logits[tokens] -= np.float32(sampling.frequency_penalty) * times
        logits[tokens] -= np.float32(sampling.presence_penalty)
    logits[list(banned)] = -np.inf
    return logits


@cache
def drawer() -> Draw:
    """The token at `number`, in [0, 1), of those that `candidates` gives; `top` is the largest logit. Our
    kernels' where they are installed: numpy takes ten times as long."""
    try:
        from .. import _kernels
    except ImportError:
        return draw_in_numpy
    kernel = _kernels.TokenSampler(choose_isa())

    def draw(logits: Logits, top: float, sampling: ResolvedSampling, number: float) -> int:
        return kernel.draw(
            logits, top, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, number
        )

    return draw


def draw_in_numpy(logits: Logits, top: float, sampling: ResolvedSampling, number: float) -> int:
    """`drawer`'s without the kernels."""
    ids, weights = candidates(logits, sampling)
    sums = np.cumsum(weights)
    # Rounded up, the target may be the sum of all: then it is the last that adds to it.
    last = np.searchsorted(sums, sums[-1])
    return int(ids[min(np.searchsorted(sums, number * sums[-1], side="right"), last)])


def candidates(logits: Logits, sampling: ResolvedSampling) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The tokens that temperature, top_k, top_p and min_p leave, in that order as transformers and vLLM
    apply them: ids ascending [n], and their probabilities [n] float64, which sum to 1. At least one is
    left."""
    ids = np.arange(logits.size)
    if 0 < sampling.top_k < logits.size:
        # Tokens tied with the k-th stay, so that the set does not depend on how ties are ordered.
        kth = np.partition(logits, -sampling.top_k)[-sampling.top_k]
        ids = np.flatnonzero(logits >= kth)
    weights = np.exp((logits[ids].astype(np.float64) - float(logits.max())) / sampling.temperature)
    if sampling.top_p < 1.0:
        keep = _nucleus(weights, sampling.top_p)
        ids, weights = ids[keep], weights[keep]
    if sampling.min_p > 0.0:
        keep = np.flatnonzero(weights >= sampling.min_p)  # the largest is 1
        ids, weights = ids[keep], weights[keep]
    return ids, weights / weights.sum()


def _nucleus(weights: NDArray[np.float64], share: float) -> NDArray[np.int64]:
    """Indices, ascending, of the fewest largest weights that sum to at least `share` of all; ties go to the
    lowest."""
    size, enough = weights.size, share * weights.sum()
    count = min(64, size)
    while True:
        if count < size:
            edge = np.partition(weights, size - count)[size - count]
            top = np.flatnonzero(weights >= edge)
        else:
            top = np.arange(size)
        order = top[np.argsort(-weights[top], kind="stable")]
        total = np.cumsum(weights[order])
        if total[-1] >= enough or count == size:
            return np.sort(order[: int(np.searchsorted(total, enough)) + 1])
        count = min(count * 8, size)


def uniform(seed: int, index: int, position: int) -> float:
    """The random number of one sampled token, in [0, 1): 53 bits of Philox-4x64-10
    (https://doi.org/10.1145/2063384.2063405) with the seed as key and (sample index, position) in the
    counter, as `numpy.random.Philox` has it, which takes longer to make than to use. Nothing is carried from
    draw to draw."""
    a, b, c, d = 1, 0, index & _MASK64, position & _MASK64
    key, other = seed & _MASK64, 0
    for _ in range(10):
        left, right = 0xD2E7470EE14C6C93 * a, 0xCA5A826395121157 * c
        a, b, c, d = (right >> 64) ^ b ^ key, right & _MASK64, (left >> 64) ^ d ^ other, left & _MASK64
        key, other = (key + 0x9E3779B97F4A7C15) & _MASK64, (other + 0xBB67AE8584CAA73B) & _MASK64
    return (a >> 11) * 2.0**-53


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
