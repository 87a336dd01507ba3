"""GPTQ (https://arxiv.org/abs/2210.17323): columns are rounded one after another, and what each rounding
changes in the layer's output is made good by the columns that are still to come."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import QuantizationError
from .packing import QuantizedTensor
from .recipe import Recipe
from .rtn import check_finite, pack, resolved_group_size
from .scales import all_scales, group_scales, one_thread, round_to_grid

if TYPE_CHECKING:
    from torch import Tensor

# Columns rounded before their errors are passed on to the rest in one matrix product. It divides every group
# size, so that a group always starts on up-to-date weights.
BLOCK = 32
DAMP_RETRIES = 3


def hessian(inputs: "Tensor", *, tokens: int = 8192, columns: int = 512) -> "Tensor":
    """The mean of x xᵀ over inputs [tokens, in] float32: [in, in] float32, half the Hessian of the squared
    output error. Summed over `tokens` at a time; only the blocks on and above the diagonal are computed."""
    import torch

    total, size = inputs.shape
    result = torch.zeros(size, size)
    for start in range(0, total, tokens):
        x = inputs[start : start + tokens]
        for i in range(0, size, columns):
            result[i : i + columns, i:].addmm_(x[:, i : i + columns].T, x[:, i:])
    result = result.triu_()
    result += result.triu(1).T
    return result.div_(total)


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
    if not torch.isfinite(hessian).all():
        raise QuantizationError(f"{label}: its input on the calibration text is not finite")
    group_size = resolved_group_size(recipe, hessian.shape[0])
    stacked = torch.cat([weight.T for weight in weights], dim=1)
    try:
        codes, scale, zero, permutation = _quantize_columns(stacked, hessian, recipe, group_size)
    except QuantizationError as error:
        raise QuantizationError(f"{label}: {error}") from None
    results, start = [], 0
    for weight in weights:
        part = slice(start, start + weight.shape[0])
        results.append(pack(codes[:, part], scale[:, part], zero[:, part], recipe, group_size, permutation))
        start = part.stop
    return results


def _quantize_columns(
    weight: "Tensor", hessian: "Tensor", recipe: Recipe, group_size: int
) -> "tuple[Tensor, Tensor, Tensor, Tensor | None]":
    """Codes [in, out] uint8 in stored order, scales and zeros [groups, out], and the permutation of
    `desc_act`, for a weight [in, out] that may be overwritten."""
    import torch

    top, columns = (1 << recipe.bits) - 1, weight.shape[0]
    settings = (recipe.bits, recipe.symmetric, recipe.clip_search)
    diagonal = hessian.diagonal().clone()
    order = torch.arange(columns)
    if recipe.act_order != "none":
        order = torch.argsort(diagonal, descending=True, stable=True)
    static = recipe.act_order == "static"
    if static:
        scale, zero = all_scales(weight, diagonal, group_size, *settings)
        group_of = order // group_size
    else:
        scale, zero = weight.new_empty(2, -(-columns // group_size), weight.shape[1])
        group_of = torch.arange(columns) // group_size
    if recipe.act_order != "none":
        weight, hessian, diagonal = weight[order], hessian[order][:, order], diagonal[order]
    factor = inverse_factor(hessian, recipe.damp)
    codes = torch.empty_like(weight, dtype=torch.uint8)
    errors = weight.new_empty(BLOCK, weight.shape[1])
    groups, pivots = group_of.tolist(), factor.diagonal().tolist()
    for start in range(0, columns, BLOCK):
        end = min(start + BLOCK, columns)
        if not static and start % group_size == 0:
            part = slice(start, start + group_size)
            found = group_scales(weight[part], diagonal[part], *settings)
            scale[start // group_size], zero[start // group_size] = found
        with one_thread():
            for column in range(start, end):
                row, group = weight[column], groups[column]
                code = round_to_grid(row, scale[group], zero[group], top)
                codes[column] = code
                error = errors[column - start]
                torch.sub(row, code.sub_(zero[group]).mul_(scale[group]), out=error).div_(pivots[column])
                weight[column + 1 : end].addr_(factor[column, column + 1 : end], error, alpha=-1)
        weight[end:].addmm_(factor[start:end, end:].T, errors[: end - start], alpha=-1)
    if not static:
        return codes, scale, zero, order if recipe.act_order == "dynamic" else None
    unordered = torch.empty_like(codes)
    unordered[order] = codes
    return unordered, scale, zero, None


def inverse_factor(hessian: "Tensor", damp: float) -> "Tensor":
    """The upper triangular U with H⁻¹ = Uᵀ U, for a Hessian [in, in] with `damp` times its mean diagonal
    added; ten times more, up to three times, while it cannot be factored. Zeros on the diagonal become the
    mean. Raises `QuantizationError` when no damping helped.

    With J reversing the order, J H J = L Lᵀ gives U = (J L J)⁻¹: one factorization and one triangular
    inverse, where factoring the inverse itself takes more work and loses more digits.
    """
    import torch

    diagonal = hessian.diagonal()
    mean = float(diagonal.mean()) or 1.0
    dead = diagonal == 0
    for attempt in range(DAMP_RETRIES + 1):
        damped = hessian.flip(0, 1)
        added = torch.where(dead, mean, damp * 10**attempt * mean)
        damped.diagonal().add_(added.flip(0))
        lower, info = torch.linalg.cholesky_ex(damped)
        if int(info) == 0 and bool(torch.isfinite(lower).all()):
            identity = torch.eye(len(lower))
            factor: Tensor = torch.linalg.solve_triangular(lower.flip(0, 1), identity, upper=True)
            return factor
    raise QuantizationError(
        f"its Hessian cannot be factored, even with damping {damp * 10**DAMP_RETRIES:g}; "
        "more calibration text helps"
    )


def relative_error(weight: "Tensor", quantized: "Tensor", hessian: "Tensor") -> float:
    """The mean squared error of the layer's output over the output's mean square, on the inputs that
    `hessian` was made of: tr(ΔW H ΔWᵀ) / tr(W H Wᵀ). 0 for an output of zeros."""

    def energy(w: "Tensor") -> float:
        return float((w @ hessian).mul_(w).sum())

    whole = energy(weight)
    return max(0.0, energy(quantized - weight)) / whole if whole > 0 else 0.0
