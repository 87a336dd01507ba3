"""Perplexity and divergence against torch's own functions."""

import math

import numpy as np
import pytest

from nybble.quant.quality import evaluation_windows, kl_divergence, perplexity

torch = pytest.importorskip("torch")


def test_perplexity_is_the_exponential_of_torchs_cross_entropy() -> None:
    random = np.random.default_rng(0)
    windows = evaluation_windows(random.integers(0, 50, 200), 7, 20)
    table = torch.from_numpy(random.normal(size=(50, 50)).astype(np.float32)) * 3
    loss = torch.nn.functional.cross_entropy(
        table[torch.from_numpy(windows[:, :-1])].flatten(0, 1), torch.from_numpy(windows[:, 1:]).flatten()
    )
    sizes = []

    def logits_of(ids: np.ndarray) -> torch.Tensor:
        sizes.append(len(ids))
        return table[torch.from_numpy(ids)]

    assert perplexity(logits_of, windows, batch=3) == pytest.approx(math.exp(float(loss)), rel=1e-5)
    assert sizes == [3, 3, 1]


def test_perplexity_of_a_uniform_guess_is_the_vocabulary() -> None:
    windows = np.zeros((2, 9), np.int64)
    assert perplexity(lambda ids: np.zeros((*ids.shape, 77), np.float32), windows) == pytest.approx(77)


def test_kl_divergence() -> None:
    random = np.random.default_rng(0)
    p, q = (random.normal(size=(3, 5, 40)).astype(np.float32) * 4 for _ in range(2))
    logs = [torch.log_softmax(torch.from_numpy(x).double(), -1) for x in (p, q)]
    expected = torch.nn.functional.kl_div(logs[1], logs[0], reduction="none", log_target=True).sum(-1)
    assert np.allclose(kl_divergence(p, q), expected.numpy(), rtol=1e-4, atol=1e-6)
    assert np.abs(kl_divergence(p, p + 3)).max() < 1e-6
