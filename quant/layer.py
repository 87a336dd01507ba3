"""One layer by GPTQ, while the calibration text passes through it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..errors import QuantizationError
from ..models.source import ModelSource
from ..models.spec import ModelSpec
from .forward import fast_dtype, forward_layer, layer_stages, to_torch
from .gptq import quantize_gptq, relative_error
from .mlp import Stage
from .packing import QuantizedTensor, round_to_f16
from .recipe import LinearFormat, Recipe
from .statistics import hessian, token_weights
from .target import input_shift, output_shift, shifted, trusted_share

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(eq=False)
class QuantizedLayer:
    """A layer's tensors, and the error of each linear layer, by name."""

    tensors: dict[str, QuantizedTensor | NDArray[np.float16]] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    starved_experts: int = 0


def quantize_layer(
    source: ModelSource,
    layer: int,
    recipe: Recipe,
    hidden: "Tensor",
    reference: "Tensor | None",
    formats: Mapping[str, LinearFormat],
) -> QuantizedLayer:
    """Quantizes a layer: moves `hidden` [samples, seq_len, hidden] float32 through the quantized layer, in
    place, and `reference`, the float model's, through the float one. `formats` are the linear layers', by
    name. Without a reference nothing that went wrong before is made good, and tokens weigh the same; so it is
    in a layer with a mixture, where the float model routes other tokens to an expert.
    """
    import torch

    spec = source.spec
    result = QuantizedLayer()
    tensors, errors = result.tensors, result.errors
    linear_names = {linear.name for linear in spec.linears(layer)}
    exact = {name: to_torch(source.tensor(name)) for name in spec.layer_tensors(layer)}
    weights = exact if reference is None else dict(exact)  # the float model's layer is another
    for name in exact.keys() - linear_names:
        tensors[name] = rounded = round_to_f16(source.tensor(name), name)
        weights[name] = to_torch(rounded)
    theirs, kind = None, torch.float32
    if spec.mixture_of(layer) is None:
        # Beside what rounding to 4 bits does bfloat16 is nothing; beside 8 bits it is not.
        kind = fast_dtype() if recipe.bits <= 4 else torch.float32
        if reference is not None:
            fast = {name: exact[name].to(kind) for name in linear_names}
            theirs = _Twin(spec, layer, exact | fast, reference)
    for stage in layer_stages(spec, layer, weights, hidden):
        result.starved_experts += stage.starved
        names = [linear.name for linear in stage.linears]
        share = trusted_share(recipe.correction, *stage.inputs.shape)
        try:
            h, targets = _problem(spec, stage, weights, replace(recipe, correction=share), theirs)
        except QuantizationError as error:
            raise QuantizationError(f"{' and '.join(names)}: {error}") from None
        wanted = dict(zip(names, targets, strict=True))
        del targets
        for form in dict.fromkeys(formats[name] for name in names):
            alike = [name for name in names if formats[name] == form]
            found = quantize_gptq([wanted[name] for name in alike], h, recipe.with_format(form), alike)
            tensors.update(zip(alike, found, strict=True))
        for name, target in wanted.items():
            dequantized = to_torch(tensors[name])
            errors[name] = relative_error(target, dequantized, h)
            weights[name] = dequantized.to(kind)
    if not bool(hidden.isfinite().all()):
        raise QuantizationError(f"layer {layer}: its output on the calibration text is not finite")
    if reference is not None and theirs is None:
        forward_layer(spec, layer, exact, reference)
    return result


class _Twin:
    """The float model's layer, a stage at a time. `inputs` are the present stage's."""

    def __init__(self, spec: ModelSpec, layer: int, weights: "dict[str, Tensor]", hidden: "Tensor") -> None:
        self.stream = hidden.view(-1, hidden.shape[-1])
        self._stages = layer_stages(spec, layer, weights, hidden)
        self.inputs: Tensor | None = next(self._stages).inputs

    def advance(self) -> None:
        """To the next stage: what the present one's linear layers give has been used."""
        self.inputs = None  # before the next is computed
        stage = next(self._stages, None)
        self.inputs = None if stage is None else stage.inputs


def _problem(
    spec: ModelSpec, stage: Stage, weights: "dict[str, Tensor]", recipe: Recipe, theirs: _Twin | None
) -> "tuple[Tensor, list[Tensor]]":
    """The Hessian [in, in] and the weights [out, in] that the stage's linear layers are to come close to."""
    own = [weights[linear.name] for linear in stage.linears]
    if theirs is None:
        return hessian(stage.inputs), own
    if stage.residual is None:
        assert theirs.inputs is not None
        h = hessian(stage.inputs)
        shifts = input_shift(own, stage.inputs, theirs.inputs)
        theirs.advance()
    else:
        theirs.advance()
        (linear,) = stage.linears
        bias = weights[linear.bias_name] if linear.bias else None
        importance = token_weights(theirs.stream) if recipe.weigh_tokens else None
        h = hessian(stage.inputs, importance)
        shifts = [
            output_shift(
                own[0],
                bias,
                stage.inputs,
                stage.residual,
                theirs.stream,
                spec.residual_scale,
                importance,
                h,
            )
        ]
    if recipe.correction == 0:
        return h, own
    return h, shifted(own, shifts, h, recipe.damp, recipe.correction)
