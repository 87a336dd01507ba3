"""Mixed precision: a budget of bits per weight, spent on the linear layers by what each one's rounding costs.

What rounding one linear layer alone does to the predictions is measured in the float model. To second order
the KL divergence between predictions before and after a change ΔW is ½ E[(G · ΔW)²], with G the gradient of
the log-likelihood of a token that is drawn from the predictions themselves (the Fisher information). Errors
of different rows of W are independent, so their squares are added, row by row, over windows of the
calibration text. ΔW is that of plain rounding in each format. How the budget is best spent is then a knapsack
problem, solved exactly.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..errors import SettingError
from ..models.source import ModelSource
from ..models.spec import LinearSpec, ModelSpec
from .backward import backpropagate
from .forward import embed, to_torch
from .recipe import LinearFormat, Recipe
from .rtn import quantize_rtn

if TYPE_CHECKING:
    from torch import Tensor

LEAST_OF_FOUR = 4.25  # bits per weight of 4 bits in groups of 64
WINDOWS = 8  # of the calibration text, for the measurement
# The knapsack's table has at most this many columns; bits are rounded up to fit.
COLUMNS = 100_000


def candidates(recipe: Recipe) -> tuple[LinearFormat, ...]:
    """The formats that a linear layer may get: symmetric ones always, with zero points if the recipe has
    them. 3 bits only where 4 cannot be kept to: they save room on the disk alone."""
    kinds = (True,) if recipe.symmetric else (True, False)
    bits = (4,) if recipe.average_bits >= LEAST_OF_FOUR else (3, 4)
    few = [LinearFormat(b, size, symmetric) for b in bits for size in (64, 32) for symmetric in kinds]
    return (*few, LinearFormat(8, 64, True))


def allocate(costs: NDArray[np.int64], losses: NDArray[np.float64], budget: int) -> list[int]:
    """For each item (a row) one of its options (a column), such that the losses' sum is least and the costs'
    at most `budget`. Exact, up to `COLUMNS` different sums of what is spent beyond the cheapest options.
    Raises `SettingError` where even those cost more."""
    cheapest = costs.min(axis=1, keepdims=True)
    extra, room = costs - cheapest, int(budget - cheapest.sum())
    if room < 0:
        raise SettingError(f"the budget is {budget}; expected at least {cheapest.sum()}, the cheapest choice")
    room = min(room, int(extra.max(axis=1).sum()))
    unit = max(1, int(np.gcd.reduce(extra, axis=None)))
    unit *= max(1, -(-room // (unit * COLUMNS)))
    steps, room = -(-extra // unit), room // unit
    best = np.zeros(room + 1)
    chosen = np.zeros((len(costs), room + 1), np.int8)
    for item, (cost, loss) in enumerate(zip(steps, losses, strict=True)):
        found = np.full((costs.shape[1], room + 1), np.inf)
        for option in range(costs.shape[1]):
            if cost[option] <= room:
                found[option, cost[option] :] = best[: room + 1 - cost[option]] + loss[option]
        chosen[item] = found.argmin(0)
        best = found.min(0)
    options, left = [], room
    for item in reversed(range(len(costs))):
        option = int(chosen[item, left])
        options.append(option)
        left -= int(steps[item, option])
    return options[::-1]


def stored_bits(linear: LinearSpec, form: LinearFormat) -> int:
    """Bits of a linear layer's codes, float16 scales and zero points."""
    return linear.out_features * form.row_bits(linear.in_features)


def check_budget(spec: ModelSpec, recipe: Recipe) -> None:
    """Raises `SettingError` where `recipe.average_bits` cannot be kept to, or would be spent on parts of one
    tensor that have to be alike."""
    if spec.fused_projections:
        raise SettingError(
            f"bits are a budget, {recipe.average_bits:g}; expected 3, 4 or 8: the family stores layers in "
            "one piece, whose parts are alike"
        )
    linears = _linears(spec)
    least = _costs(linears, candidates(recipe)).min(axis=1).sum()
    if least > _bits(linears, recipe):
        needed = np.ceil(1000 * least / _weights(linears)) / 1000
        raise SettingError(
            f"bits are a budget, {recipe.average_bits:g}; expected at least {needed:g}, which the cheapest "
            "formats take"
        )


def spend(source: ModelSource, recipe: Recipe, token_ids: NDArray[np.int32]) -> dict[str, LinearFormat]:
    """The format of each linear layer by its name, within `recipe.average_bits` stored bits per weight.
    Raises as `check_budget` does, before anything is measured."""
    check_budget(source.spec, recipe)
    linears, options = _linears(source.spec), candidates(recipe)
    losses = sensitivities(source, recipe, token_ids, options)
    loss = np.array([losses[linear.name] for linear in linears])
    chosen = allocate(_costs(linears, options), loss, _bits(linears, recipe))
    return {linear.name: options[option] for linear, option in zip(linears, chosen, strict=True)}


def _linears(spec: ModelSpec) -> list[LinearSpec]:
    return [linear for layer in range(spec.num_layers) for linear in spec.linears(layer)]


def _costs(linears: Sequence[LinearSpec], options: Sequence[LinearFormat]) -> NDArray[np.int64]:
    """[linear layers, options]"""
    return np.array([[stored_bits(linear, form) for form in options] for linear in linears])


def _weights(linears: Sequence[LinearSpec]) -> int:
    return sum(linear.out_features * linear.in_features for linear in linears)


def _bits(linears: Sequence[LinearSpec], recipe: Recipe) -> int:
    """The budget of all of them together."""
    return int(recipe.average_bits * _weights(linears))


def sensitivities(
    source: ModelSource, recipe: Recipe, token_ids: NDArray[np.int32], options: Sequence[LinearFormat]
) -> dict[str, list[float]]:
    """For each linear layer by name, the divergence that rounding it in each format alone is expected to
    give, summed over tokens of some windows of `token_ids` [samples, seq_len]."""
    import torch

    spec = source.spec
    linears = {x.name for layer in range(spec.num_layers) for x in spec.linears(layer)}
    losses = {name: [0.0] * len(options) for name in linears}
    changes: dict[str, list[Tensor]] = {}
    generator = torch.Generator().manual_seed(recipe.seed)

    def weights_of(layer: int) -> "Mapping[str, Tensor]":
        return {name: to_torch(source.tensor(name)) for name in spec.layer_tensors(layer)}

    def loss(logits: "Tensor", window: int, start: int) -> "Tensor":
        with torch.no_grad():
            drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
        return torch.nn.functional.cross_entropy(logits, drawn, reduction="sum")

    def seen(layer: int, weights: "Mapping[str, Tensor]") -> None:
        for name, weight in weights.items():
            if name in linears and weight.grad is not None:
                if name not in changes:
                    changes[name] = _changes(weight.detach(), recipe, options, name)
                for option, change in enumerate(changes[name]):
                    losses[name][option] += 0.5 * float((weight.grad * change).sum(1).square().sum())
            weight.grad = None
        for name in [n for n in changes if n not in weights]:
            del changes[name]

    embedding = to_torch(source.tensor(spec.embedding_name))
    head = embedding if spec.tied_embeddings else to_torch(source.tensor(spec.head_name))
    step = max(1, len(token_ids) // WINDOWS)
    hidden = embed(spec, embedding, token_ids[::step][:WINDOWS])
    norm = to_torch(source.tensor(spec.final_norm_name))
    backpropagate(spec, hidden, weights_of, norm, head, loss, seen)
    return losses


def _changes(weight: "Tensor", recipe: Recipe, options: Sequence[LinearFormat], name: str) -> "list[Tensor]":
    """What rounding a weight in each format changes."""
    return [to_torch(quantize_rtn(weight, recipe.with_format(form), name)) - weight for form in options]
