"""A mixture of experts in the forward pass: each expert computes for the tokens that are routed to it, and is
calibrated on them.

An expert is *starved* where fewer tokens reach it than its input has elements: their Hessian is singular, and
the rounding would fit them alone. It is calibrated on as many tokens as its input has elements: its own, and
the layer's others at equal distances. What the mixture gives is not changed by that.
"""

import logging
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING

from ..models.spec import LinearSpec, MixtureSpec, ModelSpec
from .mlp import Stage, activate

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("nybble.quant")


def mixture_stages(
    spec: ModelSpec, layer: int, weights: "Mapping[str, Tensor]", x: "Tensor", *, calibrate: bool
) -> "Generator[Stage, None, Tensor]":
    """What a layer's mixture gives for `x` [tokens, hidden] float32: [tokens, hidden].

    Stops twice for each expert, before gate and up, then before down, with the tokens that it is calibrated
    on. How many experts are starved is one line in the log `nybble.quant`. Without `calibrate` none is: the
    tokens are its own, and an expert that has none is left out.
    """
    import torch

    mixture = spec.mixture_of(layer)
    assert mixture is not None
    router, *shared_gate = (weights[name] for name in spec.gates(layer))
    linears = spec.linears(layer)[4:]
    chosen, shares = routing(mixture, x @ router.T)
    enough = min(spec.hidden_size, len(x)) if calibrate else 0
    result, starved = torch.zeros_like(x), 0
    for expert in range(mixture.num_experts):
        own = chosen[:, expert].nonzero().flatten()
        few, tokens = len(own) < enough, own
        if few:
            starved += 1
            tokens = torch.cat((own, _others(chosen[:, expert], enough - len(own))))
        if len(tokens):
            given = yield from _expert_stages(spec, linears[3 * expert :][:3], weights, x[tokens], few)
            result[own] += shares[own, expert, None] * given[: len(own)]
    if shared_gate:
        given = yield from _expert_stages(spec, linears[-3:], weights, x, False)
        result += torch.sigmoid(x @ shared_gate[0].T) * given
    if starved:
        log.warning(
            "layer %d: %d of %d experts are starved: fewer than %d of %d tokens of calibration text reach "
            "them; others of the layer's were added",
            layer, starved, mixture.num_experts, enough, len(x),
        )  # fmt: skip
    return result


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


def _expert_stages(
    spec: ModelSpec,
    linears: tuple[LinearSpec, ...],
    weights: "Mapping[str, Tensor]",
    x: "Tensor",
    starved: bool,
) -> "Generator[Stage, None, Tensor]":
    """What one expert gives for `x` [tokens, hidden], unweighted."""
    from torch.nn.functional import linear

    gate, up, down = linears
    yield Stage((gate, up), x, starved=starved)
    inner = activate(linear(x, weights[gate.name]), spec.activation).mul_(linear(x, weights[up.name]))
    yield Stage((down,), inner)
    return linear(inner, weights[down.name])
