"""Rounding refined: codes, scales and zero points changed one at a time wherever that lowers the layer's
error.

With E = Ŵ − W and H = mean of x xᵀ the mean squared error of the layer's output is tr(E H Eᵀ), a sum over
rows of W. GPTQ visits each column once and never comes back. Here one code after another takes its best value
while all others stay (coordinate descent: CDQuant, https://arxiv.org/abs/2406.17542; QuantEase,
https://arxiv.org/abs/2309.01885), and after the codes of a group its scale and zero point take theirs.
Nothing that is done raises the error. All rows go at once, on transposed weights [in, out].
"""

from typing import TYPE_CHECKING

from .columns import descend_codes
from .packing import LARGEST_F16
from .scales import SMALLEST_SCALE
from .threads import one_thread

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 64  # codes whose gradient is kept up to date from one to the next
LARGEST_FITTED = 128  # groups above this keep their scales: a row's codes do as well


@one_thread()
def refine(
    target: "Tensor",
    hessian: "Tensor",
    codes: "Tensor",
    scale: "Tensor",
    zero: "Tensor",
    *,
    group_size: int,
    bits: int,
    symmetric: bool,
    sweeps: int,
) -> None:
    """Changes `codes` [in, out] float32, `scale` and `zero` [groups, out] float32 in place, `sweeps` times
    over, to bring tr(E H Eᵀ) down for a target [in, out] and a `hessian` [in, in] with a positive diagonal.

    Scales stay float16 numbers; zero points stay in 1..2^bits−1, or where they are with `symmetric`. The last
    thing that changes is a code, never a scale.
    """
    import torch

    columns, block = target.shape[0], min(group_size, BLOCK)
    groups = [range(start, min(start + group_size, columns)) for start in range(0, columns, group_size)]
    error = target.new_empty(target.shape)
    for sweep in range(sweeps):
        for group, rows in enumerate(groups):
            part = slice(rows.start, rows.stop)
            torch.sub(codes[part], zero[group], out=error[part]).mul_(scale[group]).sub_(target[part])
        for group, rows in enumerate(groups):
            for start in range(rows.start, rows.stop, block):
                part = slice(start, min(start + block, rows.stop))
                gradient = hessian[part] @ error
                descend(
                    hessian[part, part], gradient, codes[part], error[part], scale[group], zero[group], bits
                )
            if sweep < sweeps - 1 and group_size <= LARGEST_FITTED:
                if len(rows) > block:
                    part = slice(rows.start, rows.stop)
                    gradient = hessian[part] @ error
                fit_scale(
                    hessian[part, part],
                    gradient,
                    codes[part],
                    error[part],
                    scale[group],
                    zero[group],
                    bits,
                    symmetric,
                )


def descend(
    hessian: "Tensor",
    gradient: "Tensor",
    codes: "Tensor",
    error: "Tensor",
    scale: "Tensor",
    zero: "Tensor",
    bits: int,
) -> None:
    """Each code of one group, in order, takes the value of least error while the others stay.

    `hessian` [g, g] is the group's own, `gradient` [g, out] the group's rows of H E, `error` [g, out] those
    of E; all but `hessian`, `scale` and `zero` [out] are kept up to date.
    """
    import torch

    steps = gradient / scale
    moved = torch.empty_like(codes)
    descend_codes(hessian, steps, bits, codes, moved)
    moved *= scale
    error += moved
    gradient.addmm_(hessian, moved)


def fit_scale(
    hessian: "Tensor",
    gradient: "Tensor",
    codes: "Tensor",
    error: "Tensor",
    scale: "Tensor",
    zero: "Tensor",
    bits: int,
    symmetric: bool,
) -> None:
    """The scale of one group, and with it the zero point, take the values of least error while the codes and
    the other groups stay.

    For weights s u with u = c − z the error is s² uᵀ H u − 2 s uᵀ t plus what does not depend on them, where
    t = H (s u) − gradient with the values they have. The best s is uᵀ t / uᵀ H u, which lowers the error by
    (uᵀ t)² / uᵀ H u; zero points next to z are tried each with its own s.
    """
    import torch

    top = (1 << bits) - 1
    old = (codes - zero) * scale
    wanted = hessian @ old - gradient
    coded = hessian @ codes
    quadratic = ((codes * coded).sum(0), coded.sum(0), hessian.sum())
    linear = ((codes * wanted).sum(0), wanted.sum(0))
    # Change in error against the present values, with the scale rounded to float16 as it will be stored.
    best_scale, best_zero = scale.clone(), zero.clone()
    best = (quadratic[0] - 2 * zero * quadratic[1] + zero.square() * quadratic[2]) * scale.square()
    best -= 2 * scale * (linear[0] - zero * linear[1])
    for offset in (0,) if symmetric else (0, -1, 1):
        z = (zero + offset).clamp_(1, top) if offset else zero
        curve = quadratic[0] - 2 * z * quadratic[1] + z.square() * quadratic[2]
        slope = linear[0] - z * linear[1]
        s = (slope / curve).clamp_(SMALLEST_SCALE, LARGEST_F16).half().float()
        found = curve * s.square() - 2 * s * slope
        better = (curve > 0) & (slope > 0) & (found < best)
        best = torch.where(better, found, best)
        best_scale = torch.where(better, s, best_scale)
        best_zero = torch.where(better, z, best_zero)
    scale.copy_(best_scale)
    zero.copy_(best_zero)
    error += (codes - zero).mul_(scale).sub_(old)
