"""Gradients layer by layer against torch's own through the whole decoder at once."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from nybble.models import open_source
from nybble.quant.backward import backpropagate
from nybble.quant.forward import embed, head_logits, layer_output, layer_rope_tables, to_torch

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "granite"])
def test_equals_autograd(make_tiny_model: Callable[..., Path], family: str) -> None:
    source = open_source(make_tiny_model(family))
    spec = source.spec
    ids = np.random.default_rng(0).integers(0, 512, (2, 20))
    embedding = to_torch(source.tensor(spec.embedding_name))
    head = to_torch(source.tensor(spec.head_name))
    hidden = embed(spec, embedding, ids)

    def parameters() -> list[dict[str, torch.Tensor]]:
        return [
            {name: to_torch(source.tensor(name)).requires_grad_() for name in spec.layer_tensors(layer)}
            for layer in range(spec.num_layers)
        ]

    def loss(logits: torch.Tensor, window: int, start: int) -> torch.Tensor:
        wanted = torch.from_numpy(ids[window, start : start + len(logits)])
        return torch.nn.functional.cross_entropy(logits, wanted, reduction="sum") * (window + 1)

    expected, found = parameters(), parameters()
    norms = [to_torch(source.tensor(spec.final_norm_name)).requires_grad_() for _ in range(2)]
    x = hidden.clone()
    for layer, weights in enumerate(expected):
        x = layer_output(spec, layer, weights, x, layer_rope_tables(spec, layer, 20))
    logits = head_logits(spec, norms[0], head, x)
    total = loss(logits[0], 0, 0) + loss(logits[1], 1, 0)
    total.backward()
    value = backpropagate(spec, hidden.clone(), lambda layer: found[layer], norms[1], head, loss)
    assert value == pytest.approx(float(total), rel=1e-5)
    pairs = [(a[name].grad, b[name].grad) for a, b in zip(expected, found, strict=True) for name in a]
    for one, other in [*pairs, (norms[0].grad, norms[1].grad)]:
        assert one.abs().max() > 0
        assert torch.allclose(one, other, atol=1e-4 * float(one.abs().max()))

    windows: dict[str, list[torch.Tensor]] = {}

    def seen(layer: int, weights: dict[str, torch.Tensor]) -> None:
        for name, weight in weights.items():
            windows.setdefault(name, []).append(weight.grad.clone())
            weight.grad = None

    fresh = parameters()
    backpropagate(spec, hidden.clone(), lambda layer: fresh[layer], norms[1].detach(), head, loss, seen)
    for weights in expected:
        for name, weight in weights.items():
            one, two = windows[name]
            assert torch.allclose(one + two, weight.grad, atol=1e-4 * float(weight.grad.abs().max()))
