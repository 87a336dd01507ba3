"""What a linear layer's calibration inputs are reduced to: products over all tokens, [in, in] or [in,
out]."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

TOKENS = 8192  # of one product: bounds temporary memory


def hessian(
    inputs: "Tensor", weights: "Tensor | None" = None, *, tokens: int = TOKENS, columns: int = 192
) -> "Tensor":
    """The mean of w x xᵀ over inputs [tokens, in] float32 and their weights w [tokens] (None: 1 each), [in,
    in] float32: half the Hessian of the squared output error. Summed over `tokens` at a time; only the blocks
    on and above the diagonal are computed."""
    import torch

    total, size = inputs.shape
    result = torch.zeros(size, size)
    for start in range(0, total, tokens):
        part = slice(start, start + tokens)
        x = inputs[part] if weights is None else inputs[part] * weights[part, None].sqrt()
        for i in range(0, size, columns):
            result[i : i + columns, i:].addmm_(x[:, i : i + columns].T, x[:, i:])
    result = result.triu_()
    result += result.triu(1).T
    return result.div_(total)


def token_weights(residual: "Tensor") -> "Tensor":
    """A weight for each token of a residual stream [tokens, hidden]: one over its mean square, on average 1.

    The norm that reads the stream next divides by just that, so the same error counts less in a token whose
    stream is large. Without it a handful of first tokens with activations a thousand times the others' decide
    alone how the layers that write to the stream are rounded."""
    import torch

    mean_square = residual.square().mean(1)
    weights = 1 / mean_square.clamp_(min=torch.finfo(torch.float32).tiny)
    return weights.div_(weights.mean())
