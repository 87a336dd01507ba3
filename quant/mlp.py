"""What an MLP and an expert have in common."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..models.spec import Activation, LinearSpec
from ..records import dataclass

if TYPE_CHECKING:
    from torch import Tensor

# Called before linear layers that share an input, with that input [tokens, in_features] float32. It may
# replace those layers' weights in the mapping that `forward_layer` was given.
BeforeLinears = Callable[[tuple[LinearSpec, ...], "Tensor"], None]


@dataclass(frozen=True)
class Stage:
    """Linear layers that share an input, before they are computed: their input [tokens, in_features] float32,
    and the residual stream [tokens, hidden] that their output goes to where nothing but a factor is in
    between. `starved`: an expert's first, which few tokens reach."""

    linears: tuple[LinearSpec, ...]
    inputs: "Tensor"
    residual: "Tensor | None" = None
    starved: bool = False


def activate(x: "Tensor", activation: Activation) -> "Tensor":
    """The MLP's activation function; may overwrite `x` where nothing is differentiated."""
    import torch
    from torch.nn import functional

    inplace = not torch.is_grad_enabled()
    if activation == "silu":
        return functional.silu(x, inplace=inplace)
    if activation == "relu":
        return functional.relu(x, inplace=inplace)
    return functional.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
