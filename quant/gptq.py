"""GPTQ (https://arxiv.org/abs/2210.17323): columns are rounded one after another, and what each rounding
changes in the layer's output is made good by the columns that are still to come."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import QuantizationError
from .columns import round_columns
from .packing import QuantizedTensor
from .recipe import Recipe
from .refine import refine
from .rtn import check_finite, pack, resolved_group_size
from .scales import all_scales, group_scales
from .threads import in_parallel, one_thread

if TYPE_CHECKING:
    from torch import Tensor

# Columns rounded before their errors are passed on to the rest in one matrix product. It divides every group
# size, so that a group always starts on up-to-date weights.
BLOCK = 32
DAMP_RETRIES = 3
SMALLEST_PART = 256  # outputs that are worth a thread of their own


def quantize_gptq(
    weights: "Sequence[Tensor]", hessian: "Tensor", recipe: Recipe, names: Sequence[str]
) -> list[QuantizedTensor]:
    """Quantizes weights [out, in] float32 that share their input, in one loop over columns.

    `hessian` [in, in] float32 is the mean of x xᵀ; it is not changed. A column that no input reaches (a zero
    on the diagonal) is rounded by itself. Raises `QuantizationError` naming the tensors where a value is not
    finite or the Hessian cannot be factored even with more damping.
    """
    import torch

    for weight, name in zip(weights, names, strict=True):
        check_finite(weight, name)
    label = " and ".join(names)
    group_size = resolved_group_size(recipe, hessian.shape[0])
    stacked = torch.cat([weight.T for weight in weights], dim=1)
    try:
        codes, scale, zero, permutation = _quantize_columns(stacked, hessian, recipe, group_size)
    except QuantizationError as error:
        raise QuantizationError(f"{label}: {error}") from None
    results, start = [], 0
    for weight in weights:
        part = slice(start, start + weight.shape[0])
        results.append(
            pack(codes[:, part].byte(), scale[:, part], zero[:, part], recipe, group_size, permutation)
        )
        start = part.stop
    return results


def _quantize_columns(
    weight: "Tensor", hessian: "Tensor", recipe: Recipe, group_size: int
) -> "tuple[Tensor, Tensor, Tensor, Tensor | None]":
    """Codes [in, out] in stored order, scales and zeros [groups, out], all float32, and the permutation of
    `desc_act`, for a weight [in, out]."""
    import torch

    static = recipe.act_order == "static"
    diagonal = hessian.diagonal()
    order = torch.arange(len(hessian))
    if recipe.act_order != "none":
        order = torch.argsort(diagonal, descending=True, stable=True)
    # What is to be small is the sum of squares that the damped Hessian gives; in visited order.
    backwards = order.flip(0)
    damped, lower = factored(hessian[backwards][:, backwards], recipe.damp)
    hessian, factor = damped.flip(0, 1), inverse_factor(lower)
    inverse = torch.argsort(order)
    stored = hessian[inverse][:, inverse] if static else hessian

    def quantize(weight: "Tensor") -> "tuple[Tensor, Tensor, Tensor]":
        grid = None
        if static:
            grid = all_scales(weight, diagonal, group_size, recipe.bits, recipe.symmetric, recipe.clip_search)
        visited = weight[order]
        target = weight if static else visited.clone()
        codes, scale, zero = _visit_columns(visited, hessian, factor, recipe, group_size, grid, order)
        codes = codes[inverse] if static else codes
        if recipe.sweeps:
            refine(
                target,
                stored,
                codes,
                scale,
                zero,
                group_size=group_size,
                bits=recipe.bits,
                symmetric=recipe.symmetric,
                sweeps=recipe.sweeps,
            )
        return codes, scale, zero

    # Rows of the weight have nothing to do with one another.
    parts = max(1, min(torch.get_num_threads(), weight.shape[1] // SMALLEST_PART))
    found = in_parallel(quantize, [part.contiguous() for part in weight.chunk(parts, dim=1)])
    codes, scale, zero = (torch.cat(pieces, dim=1) for pieces in zip(*found, strict=True))
    return codes, scale, zero, order if recipe.act_order == "dynamic" else None


@one_thread()
def _visit_columns(
    weight: "Tensor",
    hessian: "Tensor",
    factor: "Tensor",
    recipe: Recipe,
    group_size: int,
    grid: "tuple[Tensor, Tensor] | None",
    order: "Tensor",
) -> "tuple[Tensor, Tensor, Tensor]":
    """GPTQ's loop: codes [in, out] in visited order, scales and zeros [groups, out]. `grid` has these where
    they are fixed beforehand, for groups of the original order; else groups are of visited columns. `weight`
    [in, out] is used up."""
    import torch

    columns = weight.shape[0]
    if grid is None:
        scale, zero = weight.new_empty(2, -(-columns // group_size), weight.shape[1])
        groups = torch.arange(columns, dtype=torch.int32) // group_size
    else:
        scale, zero = grid
        groups = (order // group_size).int()
    diagonal = hessian.diagonal()
    codes = torch.empty_like(weight)
    errors = weight.new_empty(BLOCK, weight.shape[1])
    passed_on = factor / factor.diagonal()[:, None]
    for start in range(0, columns, BLOCK):
        part = slice(start, min(start + BLOCK, columns))
        if grid is None and start % group_size == 0:
            first = slice(start, start + group_size)
            found = group_scales(
                weight[first], diagonal[first], recipe.bits, recipe.symmetric, recipe.clip_search
            )
            scale[start // group_size], zero[start // group_size] = found
        found_errors = errors[: part.stop - start]
        round_columns(
            weight[part],
            passed_on[part, part],
            scale,
            zero,
            groups[part],
            recipe.bits,
            codes[part],
            found_errors,
        )
        weight[part.stop :].addmm_(passed_on[part, part.stop :].T, found_errors, alpha=-1)
    return codes, scale, zero


def factored(hessian: "Tensor", damp: float) -> "tuple[Tensor, Tensor]":
    """A Hessian H [in, in] with `damp` times its mean diagonal added, and ten times more, up to three times,
    while it cannot be factored; and the lower triangular L with H = L Lᵀ. Zeros on the diagonal become the
    mean. Raises `QuantizationError` where H is not finite, or no damping helped."""
    import torch

    if not torch.isfinite(hessian).all():
        raise QuantizationError("its input on the calibration text is not finite")
    diagonal = hessian.diagonal()
    mean = float(diagonal.mean()) or 1.0
    dead = diagonal == 0
    for attempt in range(DAMP_RETRIES + 1):
        result = hessian.clone()
        result.diagonal().add_(torch.where(dead, mean, damp * 10**attempt * mean))
        lower, info = torch.linalg.cholesky_ex(result)
        if int(info) == 0 and bool(torch.isfinite(lower).all()):
            return result, lower
    raise QuantizationError(
        f"its Hessian cannot be factored, even with damping {damp * 10**DAMP_RETRIES:g}; "
        "more calibration text helps"
    )


def inverse_factor(lower: "Tensor") -> "Tensor":
    """The upper triangular U with H⁻¹ = Uᵀ U, for a Hessian H [in, in] whose reverse has the factor `lower`.

    With J reversing the order, J H J = L Lᵀ gives U = (J L J)⁻¹: one factorization and one triangular
    inverse, where factoring the inverse itself takes more work and loses more digits.
    """
    import torch

    factor: Tensor = torch.linalg.solve_triangular(lower.flip(0, 1), torch.eye(len(lower)), upper=True)
    return factor


def relative_error(weight: "Tensor", quantized: "Tensor", hessian: "Tensor") -> float:
    """The mean squared error of the layer's output over the output's mean square, on the inputs that
    `hessian` was made of: tr(ΔW H ΔWᵀ) / tr(W H Wᵀ). 0 for an output of zeros."""

    def energy(w: "Tensor") -> float:
        return float((w @ hessian).mul_(w).sum())

    whole = energy(weight)
    return max(0.0, energy(quantized - weight)) / whole if whole > 0 else 0.0
