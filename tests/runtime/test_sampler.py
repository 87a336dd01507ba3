"""The sampler's distributions are transformers'; its random numbers depend on the request alone."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from nybble.errors import ExecutorError
from nybble.runtime import sampler
from nybble.runtime.sampler import candidates, draw_in_numpy, log_softmax, sample, top_logprobs, uniform
from nybble.runtime.sampling_params import ResolvedSampling


def random_logits(seed: int, size: int = 200) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, 3, size).astype(np.float32)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.9]),
    top_k=st.sampled_from([0, 1, 5, 50, 500]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    penalty=st.sampled_from([1.0, 1.3, 0.8]),
)
def test_distribution_equals_transformers(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, penalty: float
) -> None:
    import torch
    from transformers.generation import logits_process as hf

    logits = random_logits(seed)
    history = np.random.default_rng(seed + 1).integers(0, 200, 30)
    scores = torch.tensor(logits, dtype=torch.float64)[None]
    ids = torch.tensor(history)[None]
    steps = [hf.RepetitionPenaltyLogitsProcessor(penalty), hf.TemperatureLogitsWarper(temperature)]
    if top_k:
        steps.append(hf.TopKLogitsWarper(top_k))
    if top_p < 1:
        steps.append(hf.TopPLogitsWarper(top_p))
    if min_p:
        steps.append(hf.MinPLogitsWarper(min_p))
    for step in steps:
        scores = step(ids, scores)
    expected = torch.softmax(scores, -1)[0].numpy()

    seen = np.unique(history)
    penalized = logits.copy()
    chosen = penalized[seen]
    penalized[seen] = np.where(chosen < 0, chosen * np.float32(penalty), chosen / np.float32(penalty))
    kept, weights = candidates(penalized, ResolvedSampling(temperature, top_k, top_p, min_p))
    got = np.zeros(200)
    got[kept] = weights
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-9)


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    size=st.sampled_from([1, 15, 100, 513, 3000]),
    spread=st.sampled_from([0.0, 0.1, 3.0, 20.0]),
    ties=st.booleans(),
    number=st.floats(0, 1, exclude_max=True),
    temperature=st.sampled_from([0.01, 0.7, 1.9]),
    top_k=st.sampled_from([0, 1, 40]),
    top_p=st.sampled_from([0.05, 0.9, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
)
def test_the_kernels_draw_the_tokens_that_numpy_draws(
    seed: int, size: int, spread: float, ties: bool, number: float,
    temperature: float, top_k: int, top_p: float, min_p: float,
) -> None:  # fmt: skip
    kernels = pytest.importorskip("nybble._kernels")
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal(size) * spread).astype(np.float32)
    if ties:
        logits = np.round(logits)
    logits[rng.random(size) < 0.1] = -np.inf
    logits[rng.integers(size)] = 3 * spread  # one at least has a weight
    top = float(logits.max())
    drawn = {
        kernels.TokenSampler(isa).draw(logits, top, temperature, top_k, top_p, min_p, number)
        for isa in kernels.supported_kernels()
    }
    assert len(drawn) == 1
    sampling = ResolvedSampling(temperature, top_k, top_p, min_p)
    if decided(logits, sampling, number):
        assert drawn == {draw_in_numpy(logits, top, sampling, number)}
    else:
        assert logits[drawn.pop()] > -np.inf


def decided(logits: NDArray[np.float32], sampling: ResolvedSampling, number: float) -> bool:
    """Whether neither the filters nor the draw are so near an edge that rounding decides."""
    _, before = candidates(logits, replace(sampling, top_p=1.0, min_p=0.0))
    shares = np.cumsum(np.sort(before)[::-1])
    distances = np.abs(before / before.max() - sampling.min_p)
    _, weights = candidates(logits, sampling)
    return bool(
        (sampling.top_p == 1.0 or np.abs(shares - sampling.top_p).min() > 1e-5)
        and not ((distances > 0) & (distances < 1e-5)).any()
        and np.abs(np.cumsum(weights) - number).min() > 1e-4
    )


@pytest.mark.parametrize("draw", [None, draw_in_numpy])
def test_samples_follow_the_distribution(draw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if draw is not None:  # as where the kernels are not installed
        monkeypatch.setattr(sampler, "drawer", lambda: draw)
    logits = random_logits(3, 12)
    sampling = ResolvedSampling(temperature=0.9, top_k=6)
    kept, weights = candidates(logits, sampling)
    draws = [sample(logits, sampling, seed=11, index=0, position=p) for p in range(20_000)]
    counts = np.bincount(draws, minlength=12)
    assert counts.sum() == counts[kept].sum()
    error = np.sqrt(weights * (1 - weights) / 20_000)
    assert (np.abs(counts[kept] / 20_000 - weights) < 5 * error).all()


def test_repetition_penalty_reaches_the_choice_in_greedy_too() -> None:
    logits = np.array([2.0, 1.9, -1.0, -1.1], np.float32)
    penalty = ResolvedSampling(repetition_penalty=1.2)
    seen = np.array([0, 2])
    assert sample(logits, penalty, seed=0, index=0, position=0) == 0
    assert sample(logits, penalty, seed=0, index=0, position=0, seen=seen) == 1
    banned = [0, 1]
    assert sample(logits, penalty, seed=0, index=0, position=0, seen=seen, banned=banned) == 3


def test_ties_go_to_the_lowest_token() -> None:
    logits = np.array([0, 5, 5, 5, 1], np.float32)
    assert sample(logits, ResolvedSampling(), seed=0, index=0, position=0) == 1
    assert sample(logits, ResolvedSampling(), seed=0, index=0, position=0, banned=[1]) == 2
    kept, _ = candidates(logits, ResolvedSampling(temperature=1.0, top_p=0.5))
    assert kept.tolist() == [1, 2]
    ranks = {token: rank for token, (_, rank) in top_logprobs(logits, 3, 2).items()}
    assert ranks == {3: 3, 1: 1, 2: 2}


def test_banned_tokens_are_never_drawn() -> None:
    logits = np.zeros(5, np.float32)
    draws = {
        sample(logits, ResolvedSampling(temperature=5.0), seed=s, index=0, position=0, banned=[0, 3, 4])
        for s in range(200)
    }
    assert draws == {1, 2}
    for temperature in (0.0, 1.0):
        with pytest.raises(ExecutorError, match="position 7: all are banned"):
            sample(logits, ResolvedSampling(temperature), seed=1, index=0, position=7, banned=list(range(5)))


def test_a_row_that_is_not_numbers_is_an_error_not_a_token() -> None:
    for bad in (np.nan, np.inf):
        logits = np.array([0, bad, 1], np.float32)
        with pytest.raises(ExecutorError, match="position 9"):
            sample(logits, ResolvedSampling(), seed=0, index=0, position=9)


def test_random_numbers_are_keyed_by_seed_index_and_position() -> None:
    numbers = [uniform(s, i, p) for s in range(8) for i in range(8) for p in range(64)]
    assert len(set(numbers)) == len(numbers)
    assert all(0 <= x < 1 for x in numbers)
    assert abs(np.mean(numbers) - 0.5) < 0.02
    assert numbers[:64] == [uniform(0, 0, p) for p in range(64)]


def test_the_random_number_is_philox_4x64() -> None:
    # The first number of Random123's known answer for philox4x64 of ten rounds, counter and key 0. numpy
    # steps the counter before the first block, so its counter -1 gives that one.
    raw = int(np.random.Philox(key=0, counter=2**256 - 1).random_raw())
    assert raw == 0x16554D9ECA36314C
    bits = int(np.random.Philox(key=5, counter=(7 << 192) | (3 << 128)).random_raw())
    assert uniform(5, 3, 7) == (bits >> 11) / 2**53


@given(seed=st.integers(0, 2**64 - 1), index=st.integers(0, 99), position=st.integers(0, 2**31))
def test_the_random_number_is_numpys(seed: int, index: int, position: int) -> None:
    counter = np.array([0, 0, index, position], np.uint64)
    bits = int(np.random.Philox(key=seed, counter=counter).random_raw())
    assert uniform(seed, index, position) == (bits >> 11) / 2**53


def test_logprobs_are_the_models_own() -> None:
    logits = random_logits(4)
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    np.testing.assert_allclose(log_softmax(logits), exact, atol=1e-12)
    order = np.argsort(-exact)
    chosen = int(order[9])
    found = top_logprobs(logits, chosen, 4)
    assert list(found) == [chosen, *order[:4].tolist()]
    assert [rank for _, rank in found.values()] == [10, 1, 2, 3, 4]
    assert found[chosen][0] == pytest.approx(exact[chosen])
    assert list(top_logprobs(logits, chosen, 0)) == [chosen]
    assert len(top_logprobs(logits, chosen, 10_000)) == 200
