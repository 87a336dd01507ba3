"""Scales and zero points of weight groups, with a search for the clipping range.

Everything here works on transposed weights [in, out], so that the rows of one group are contiguous and each
step of GPTQ touches whole cache lines.
"""

from typing import TYPE_CHECKING

from ..errors import QuantizationError
from .threads import one_thread

if TYPE_CHECKING:
    from torch import Tensor

# Shares of the full range that the clipping search tries beside the whole; a tie keeps the first. At 1
# the largest positive value of a symmetric group is cut by half a step, at 1.07 by nothing.
CLIP_GRID = tuple(1.04 - 0.04 * i for i in range(14))
SMALLEST_SCALE = 2.0**-24  # float16's smallest positive number
TOGETHER = (
    1 << 18
)  # elements of groups whose ranges are searched at once: smaller operations are mostly overhead


@one_thread()
def group_scales(
    weight: "Tensor", importance: "Tensor | None", bits: int, symmetric: bool, clip_search: bool
) -> "tuple[Tensor, Tensor]":
    """Scale and zero point, [..., out] float32 each, of groups [..., group, out] float32.

    The scale is a float16 number, so that integers computed with it are exact in every format. Symmetric:
    zero is 2^(bits-1) and the scale absmax / (2^(bits-1) - 0.5). Asymmetric: the zero point stays in
    1..2^bits-1, since the GPTQ format of version 1 has no 0. With `clip_search` the range is the share of
    the full one that minimizes the squared error weighted by `importance` [..., group] (None is equal
    weights). A group of zeros has scale 1. Raises `QuantizationError` where a scale leaves float16's range.
    """
    import torch

    top = (1 << bits) - 1
    low, high = weight.amin(-2).clamp_(max=0), weight.amax(-2).clamp_(min=0)
    if symmetric:
        full = torch.maximum(-low, high) / (top / 2)
    else:
        full = torch.maximum((high - low) / top, high / (top - 1))

    def candidate(share: float) -> "tuple[Tensor, Tensor]":
        scale = (full * share).half().float().clamp_(min=SMALLEST_SCALE)
        scale = torch.where(full == 0, 1.0, scale)
        if symmetric:
            return scale, torch.full_like(scale, (top + 1) / 2)
        return scale, torch.round(-low * share / scale).clamp_(1, top)

    steps, rounded = torch.empty_like(weight), torch.empty_like(weight)

    def error(scale: "Tensor", zero: "Tensor") -> "Tensor":
        # In steps of the scale, each from its own zero point.
        torch.mul(weight, (1 / scale).unsqueeze(-2), out=steps)
        torch.round(steps, out=rounded)
        if symmetric:
            rounded.clamp_(-(top + 1) / 2, (top - 1) / 2)
        else:
            rounded.clamp_(-zero.unsqueeze(-2), (top - zero).unsqueeze(-2))
        squares = rounded.sub_(steps).square_()
        sums = squares.sum(-2) if importance is None else (importance.unsqueeze(-2) @ squares).squeeze(-2)
        return sums.mul_(scale.square())

    best_scale, best_zero = candidate(1.0)
    if clip_search:
        best_error = error(best_scale, best_zero)
        for share in CLIP_GRID:
            scale, zero = candidate(share)
            found = error(scale, zero)
            better = found < best_error
            best_error = torch.where(better, found, best_error)
            best_scale = torch.where(better, scale, best_scale)
            best_zero = torch.where(better, zero, best_zero)
    if not torch.isfinite(best_scale).all():
        raise QuantizationError(
            f"a group reaches {float(weight.abs().max()):g}; its scale leaves float16's range"
        )
    return best_scale, best_zero


def round_to_grid(weight: "Tensor", scale: "Tensor", zero: "Tensor", top: int) -> "Tensor":
    """The codes 0..top, as float32, of weights [..., out]: nearest, ties to even."""
    return (weight / scale).round_().add_(zero).clamp_(0, top)


def all_scales(
    weight: "Tensor",
    importance: "Tensor | None",
    group_size: int,
    bits: int,
    symmetric: bool,
    clip_search: bool,
) -> "tuple[Tensor, Tensor]":
    """`group_scales` of every group of a weight [in, out]: [groups, out] float32 each. The last group may
    be short."""
    import torch

    columns, out = weight.shape
    whole = columns // group_size * group_size
    step = max(1, TOGETHER // (group_size * out)) * group_size
    parts = [(slice(start, min(start + step, whole)), group_size) for start in range(0, whole, step)]
    if whole < columns:
        parts.append((slice(whole, columns), columns - whole))
    found = [
        group_scales(
            weight[part].view(-1, size, out),
            None if importance is None else importance[part].view(-1, size),
            bits,
            symmetric,
            clip_search,
        )
        for part, size in parts
    ]
    return torch.cat([scale for scale, _ in found]), torch.cat([zero for _, zero in found])
