"""A mixture of experts in the forward pass: each expert computes for the tokens that are routed to it, and is
calibrated on them.

An expert is *starved* where fewer tokens reach it than its input has elements: their Hessian is singular, and
the rounding would fit them alone. It is calibrated on as many tokens as its input has elements: its own, and
the layer's others at equal distances. What the mixture gives is not changed by that.
"""

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..models.spec import LinearSpec, MixtureSpec, ModelSpec
from .mlp import BeforeLinears, activate

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("nybble.quant")


def run_mixture(
    spec: ModelSpec,
    layer: int,
    weights: "Mapping[str, Tensor]",
    x: "Tensor",
    before: BeforeLinears | None = None,
) -> "tuple[Tensor, int]":
    """What a layer's mixture gives for `x` [tokens, hidden] float32, [tokens, hidden], and how many experts
    were starved.

    `before` is called twice for each expert, for gate and up, then for down, with its own tokens and, where
    it is starved, others; those are one line in the log `nybble.quant`. Without `before` none is.
    """
    import torch

    mixture = spec.mixture_of(layer)
    assert mixture is not None
    router, *shared_gate = (weights[name] for name in spec.gates(layer))
    linears = spec.linears(layer)[4:]
    chosen, shares = routing(mixture, x @ router.T)
    enough = min(spec.hidden_size, len(x)) if before is not None else 0
    result, starved = torch.zeros_like(x), 0
    for expert in range(mixture.num_experts):
        own = chosen[:, expert].nonzero().flatten()
        tokens = own
        if len(own) < enough:
            starved += 1
            tokens = torch.cat((own, _others(chosen[:, expert], enough - len(own))))
        if len(tokens):
            given = _run_expert(spec, linears[3 * expert :][:3], weights, x[tokens], before)[: len(own)]
            result[own] += shares[own, expert, None] * given
    if shared_gate:
        given = _run_expert(spec, linears[-3:], weights, x, before)
        result += torch.sigmoid(x @ shared_gate[0].T) * given
    if starved:
        log.warning(
            "layer %d: %d of %d experts are starved: fewer than %d of %d tokens of calibration text reach "
            "them; others of the layer's were added",
            layer, starved, mixture.num_experts, enough, len(x),
        )  # fmt: skip
    return result, starved


def routing(mixture: MixtureSpec, logits: "Tensor") -> "tuple[Tensor, Tensor]":
    """Which experts compute for each token, [tokens, num_experts] bool, and the weights of what they give,
    float32, 0 for the others; of the router's logits [tokens, num_experts]."""
    import torch

    order = logits.sort(dim=1, descending=True, stable=True).indices[:, : mixture.experts_per_token]
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, order, True)
    shares = logits.softmax(dim=1).masked_fill_(~chosen, 0)
    return chosen, shares / shares.sum(dim=1, keepdim=True) if mixture.normalized else shares


def _others(chosen: "Tensor", count: int) -> "Tensor":
    """Up to `count` tokens that an expert was not `chosen` for, [tokens] bool, at equal distances."""
    import torch

    found = (~chosen).nonzero().flatten()
    count = min(count, len(found))
    return found[torch.arange(count) * len(found) // max(1, count)]


def _run_expert(
    spec: ModelSpec,
    linears: tuple[LinearSpec, ...],
    weights: "Mapping[str, Tensor]",
    x: "Tensor",
    before: BeforeLinears | None,
) -> "Tensor":
    """What one expert gives for `x` [tokens, hidden], unweighted."""
    from torch.nn.functional import linear

    gate, up, down = linears
    if before is not None:
        before((gate, up), x)
    inner = activate(linear(x, weights[gate.name]), spec.activation).mul_(linear(x, weights[up.name]))
    if before is not None:
        before((down,), inner)
    return linear(inner, weights[down.name])
