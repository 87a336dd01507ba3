"""What an MLP and an expert have in common."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..models.spec import Activation, LinearSpec

if TYPE_CHECKING:
    from torch import Tensor

# Called before linear layers that share an input, with that input [tokens, in_features] float32. It may
# replace those layers' weights in the mapping that `forward_layer` was given.
BeforeLinears = Callable[[tuple[LinearSpec, ...], "Tensor"], None]


def activate(x: "Tensor", activation: Activation) -> "Tensor":
    """The MLP's activation function; may overwrite `x`."""
    from torch.nn import functional

    if activation == "silu":
        return functional.silu(x, inplace=True)
    if activation == "relu":
        return functional.relu(x, inplace=True)
    return functional.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
