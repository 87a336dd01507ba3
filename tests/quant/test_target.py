"""The least-squares weight that a layer is asked to come close to, against numpy's least squares."""

import numpy as np
import pytest

from nybble.quant import statistics, target

torch = pytest.importorskip("torch")


def arrays(tokens: int = 500, columns: int = 24, out: int = 10) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    mixing = np.eye(columns) + 0.1 * random.normal(size=(columns, columns))
    inputs = random.normal(size=(tokens, columns)) @ mixing
    return {
        "weight": random.normal(size=(out, columns)),
        "bias": random.normal(size=out),
        "inputs": inputs,
        "wanted": inputs + 0.3 * random.normal(size=(tokens, columns)) + 0.1 * inputs[:, ::-1],
        "stream": random.normal(size=(tokens, out)),
        "goal": random.normal(size=(tokens, out)) * 2,
    }


def tensors(data: dict[str, np.ndarray]) -> dict[str, "torch.Tensor"]:
    return {name: torch.from_numpy(value).float() for name, value in data.items()}


def test_inputs_that_differ() -> None:
    data = arrays()
    t = tensors(data)
    (shift,) = target.input_shift([t["weight"]], t["inputs"], t["wanted"])
    (found,) = target.shifted([t["weight"]], [shift], statistics.hessian(t["inputs"]), 1e-7, 1.0)
    expected = np.linalg.lstsq(data["inputs"], data["wanted"] @ data["weight"].T, rcond=None)[0].T
    assert np.abs(found.numpy() - expected).max() < 1e-3
    (half,) = target.shifted([t["weight"]], [shift], statistics.hessian(t["inputs"]), 1e-7, 0.5)
    assert np.abs(half.numpy() - (expected + data["weight"]) / 2).max() < 1e-3


@pytest.mark.parametrize("weighted", [False, True])
def test_residual_stream_that_differs(weighted: bool) -> None:
    data = arrays()
    t = tensors(data)
    scale = 0.7
    importance = statistics.token_weights(t["goal"]) if weighted else None
    h = statistics.hessian(t["inputs"], importance)
    shift = target.output_shift(
        t["weight"], t["bias"], t["inputs"], t["stream"], t["goal"], scale, importance, h
    )
    (found,) = target.shifted([t["weight"]], [shift], h, 1e-7, 1.0)
    root = np.ones(500) if importance is None else importance.numpy().astype(np.float64) ** 0.5
    wanted = (data["goal"] - data["stream"]) / scale - data["bias"]
    expected = np.linalg.lstsq(data["inputs"] * root[:, None], wanted * root[:, None], rcond=None)[0].T
    assert np.abs(found.numpy() - expected).max() < 1e-3


def test_tokens_weigh_less_where_the_stream_is_large() -> None:
    stream = torch.ones(4, 8)
    stream[2] *= 10
    weights = statistics.token_weights(stream)
    assert weights.tolist() == pytest.approx([4 / 3.01, 4 / 3.01, 4 / 301, 4 / 3.01], rel=1e-5)
    inputs = torch.from_numpy(np.random.default_rng(1).normal(size=(4, 6))).float()
    expected = (inputs * weights[:, None]).T.double() @ inputs.double() / 4
    assert torch.allclose(statistics.hessian(inputs, weights).double(), expected, rtol=1e-5)
