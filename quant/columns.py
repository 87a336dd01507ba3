"""The inner loops over columns, whose operations are too small for torch: by the C++ extension where it is
there, and else as it computes them.

Weights are transposed, [in, out] float32.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

try:
    from .. import _kernels
except ImportError:  # the wheel without compiled code
    _kernels = None  # type: ignore[assignment]

COMPILED = _kernels is not None


def round_columns(
    weight: "Tensor",
    passed_on: "Tensor",
    scale: "Tensor",
    zero: "Tensor",
    groups: "Tensor",
    bits: int,
    codes: "Tensor",
    errors: "Tensor",
) -> None:
    """GPTQ's loop over the columns of one block [block, out]: each is rounded, and `passed_on` [block, block]
    times its error is taken off the later ones. `groups` [block] int32 are the columns' rows of `scale` and
    `zero` [groups, out]. `weight` is used up; `codes` and `errors` [block, out] are filled."""
    import torch

    if _kernels is not None:
        _kernels.round_columns(
            weight.numpy(),
            passed_on.contiguous().numpy(),
            scale.numpy(),
            zero.numpy(),
            groups.numpy(),
            bits,
            codes.numpy(),
            errors.numpy(),
        )
        return
    top, last = (1 << bits) - 1, len(weight) - 1
    columns = zip(weight, codes, errors, passed_on, scale[groups], zero[groups], strict=True)
    for column, (row, code, error, share, step, middle) in enumerate(columns):
        torch.div(row, step, out=code).round_().add_(middle).clamp_(0, top)
        torch.sub(code, middle, out=error).mul_(step)
        torch.sub(row, error, out=error)
        if column < last:
            weight[column + 1 :].addr_(share[column + 1 :], error, alpha=-1)


def descend_codes(hessian: "Tensor", steps: "Tensor", bits: int, codes: "Tensor", change: "Tensor") -> None:
    """Each of the codes [block, out], in order, takes the value of least error while the others stay;
    `change` is filled with what was added. `hessian` is the block's own [block, block], `steps` the block's
    rows of H E over the scale; it is used up."""
    import torch

    if _kernels is not None:
        _kernels.descend_codes(
            hessian.contiguous().numpy(), steps.numpy(), bits, codes.numpy(), change.numpy()
        )
        return
    top, last = (1 << bits) - 1, len(codes) - 1
    columns = zip(hessian.diagonal().tolist(), hessian, codes, steps, change, strict=True)
    for column, (pivot, row, code, step, moved) in enumerate(columns):
        best = torch.sub(code, step, alpha=1 / pivot).round_().clamp_(0, top)
        torch.sub(best, code, out=moved)
        code.copy_(best)
        if column < last:
            steps[column + 1 :].addr_(row[column + 1 :], moved)
