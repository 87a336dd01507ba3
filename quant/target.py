"""What a layer is asked to compute: the float model's output, on the inputs that the quantized model gives
it.

The layers before have been quantized, so a layer's inputs X differ from the float model's X'. With H = mean
of x xᵀ, the weight whose outputs on X come closest to what is wanted, Y, is the least-squares solution

    W* = W + (mean of (y − W x) xᵀ) H⁻¹

and rounding W* instead of W makes good what went wrong before (asymmetric calibration: GPTAQ,
https://arxiv.org/abs/2504.02692; Qronos, https://arxiv.org/abs/2505.11695). For q, k, v, gate and up, Y is
W X'. What o and down give is added to the residual stream, so Y is the float model's stream after the
addition less ours before it: the stream's own error is part of what they are asked to make good.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .gptq import factored
from .statistics import TOKENS

if TYPE_CHECKING:
    from torch import Tensor

# W* has as many unknowns for each output as there are inputs: a shorter text determines its own noise.
TOKENS_PER_INPUT = 10


def trusted_share(share: float, tokens: int, inputs: int) -> float:
    """What is left of a share of the correction where a text of so many tokens is short for so many inputs:
    as much of it as there is of `TOKENS_PER_INPUT`."""
    return share * min(1.0, tokens / (TOKENS_PER_INPUT * inputs))


def input_shift(weights: "Sequence[Tensor]", inputs: "Tensor", wanted: "Tensor") -> "list[Tensor]":
    """The mean of x (W (x' − x))ᵀ, [in, out] for each weight [out, in], of inputs x and the float model's x'
    [tokens, in]."""
    import torch

    between = torch.zeros(inputs.shape[1], inputs.shape[1])
    for start in range(0, len(inputs), TOKENS):
        x = inputs[start : start + TOKENS]
        between.addmm_(x.T, wanted[start : start + TOKENS] - x)
    between.div_(len(inputs))
    return [between @ weight.T for weight in weights]


def output_shift(
    weight: "Tensor",
    bias: "Tensor | None",
    inputs: "Tensor",
    stream: "Tensor",
    wanted: "Tensor",
    scale: float,
    token_weights: "Tensor | None",
    hessian: "Tensor",
) -> "Tensor":
    """The mean of x (y − W x)ᵀ, [in, out], for a layer whose output times `scale` is added to `stream`
    [tokens, hidden], which is to become `wanted`. `hessian` is that of the inputs: the mean of x (W x)ᵀ is
    H Wᵀ."""
    import torch

    result = torch.zeros(weight.shape[1], weight.shape[0])
    for start in range(0, len(inputs), TOKENS):
        part = slice(start, start + TOKENS)
        y = (wanted[part] - stream[part]).div_(scale)
        y = y if bias is None else y.sub_(bias)
        y = y if token_weights is None else y.mul_(token_weights[part, None])
        result.addmm_(inputs[part].T, y)
    return result.div_(len(inputs)).addmm_(hessian, weight.T, alpha=-1)


def shifted(
    weights: "Sequence[Tensor]", shifts: "Sequence[Tensor]", hessian: "Tensor", damp: float, share: float
) -> "list[Tensor]":
    """`share` of the way from weights [out, in] that share their input to their W*, for the means of
    x (y − W x)ᵀ, [in, out] each.

    `damp` times the mean diagonal is added to the Hessian, which holds back what the text barely
    determines. Raises `QuantizationError` as `factored` does."""
    import torch

    _, lower = factored(hessian, damp)
    solved = torch.cholesky_solve(torch.cat(list(shifts), dim=1), lower).mul_(share)
    parts = torch.split(solved, [len(weight) for weight in weights], dim=1)
    return [weight + part.T for weight, part in zip(weights, parts, strict=True)]
