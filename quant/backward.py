"""The gradient of a loss through the whole decoder, with one layer's work in memory at a time.

The way forth keeps each layer's input, the way back computes each layer once more. A layer's weights are made
when it is their turn, both times.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ..models.spec import ModelSpec
from .forward import head_logits, layer_output, layer_rope_tables

if TYPE_CHECKING:
    from torch import Tensor

POSITIONS = 256  # whose logits are held at a time

WeightsOf = Callable[[int], "Mapping[str, Tensor]"]
# From logits [positions, vocab], the window they are of and the first one's position in it: the sum of a
# loss.
Loss = Callable[["Tensor", int, int], "Tensor"]
# Called with a layer's weights when one window's gradients have been added to theirs.
Seen = Callable[[int, "Mapping[str, Tensor]"], None]


def backpropagate(
    spec: ModelSpec,
    hidden: "Tensor",
    weights_of: WeightsOf,
    final_norm: "Tensor",
    head: "Tensor",
    loss: Loss,
    seen: Seen | None = None,
) -> float:
    """The loss of embedded windows of tokens [windows, seq_len, hidden], summed; its gradient goes back to
    whatever requires one among the weights that `weights_of` gives of a layer, and the final norm's.

    `seen` is given copies of a layer's weights instead, after each window, and none goes further than these.
    """
    import torch

    windows, length, _ = hidden.shape
    inputs = []
    tables = [layer_rope_tables(spec, layer, length) for layer in range(spec.num_layers)]
    with torch.no_grad():
        for layer in range(spec.num_layers):
            inputs.append(hidden)
            weights = weights_of(layer)
            hidden = torch.cat([layer_output(spec, layer, weights, x[None], tables[layer]) for x in hidden])
    total, gradient = 0.0, torch.empty_like(hidden)
    with torch.enable_grad():
        norm = final_norm.detach().requires_grad_()
        for window in range(windows):
            for start in range(0, length, POSITIONS):
                part = slice(start, start + POSITIONS)
                x = hidden[window, part].detach().requires_grad_()
                value = loss(head_logits(spec, norm, head, x), window, start)
                value.backward()  # type: ignore[no-untyped-call]
                assert x.grad is not None
                gradient[window, part] = x.grad
                total += float(value.detach())
        if seen is None:
            _pass_on(final_norm, norm)
        for layer in reversed(range(spec.num_layers)):
            hidden, weights = inputs.pop(), weights_of(layer)
            copies = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
            for window in range(windows):
                x = hidden[window : window + 1].detach().requires_grad_()
                y = layer_output(spec, layer, copies, x, tables[layer])
                y.backward(gradient[window : window + 1])  # type: ignore[no-untyped-call]
                assert x.grad is not None
                gradient[window] = x.grad[0]
                if seen is not None:
                    seen(layer, copies)
            if seen is None:
                for name, weight in weights.items():
                    _pass_on(weight, copies[name])
    return total


def _pass_on(weight: "Tensor", copy: "Tensor") -> None:
    """The gradient of a copy to what the weight was computed from."""
    if weight.requires_grad:
        weight.backward(copy.grad)  # type: ignore[no-untyped-call]
