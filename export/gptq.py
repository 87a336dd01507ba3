"""The GPTQ half of an artifact: `model.safetensors` in the AutoGPTQ layout, which GPTQModel, transformers and
vLLM load."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ..errors import OutputError, QuantizationError
from ..models.spec import ModelSpec, StoredLinear
from ..quant.model import QuantizedModel
from ..quant.packing import CheckpointFormat, QuantizedTensor, to_gptq
from ..quant.packing_narrow import narrow_gptq
from ..quant.packing_nf4 import AnyQuantized
from ..quant.packing_rows import stacked
from ..quant.recipe import Recipe
from .checkpoint_writer import Layout, checkpoint_layout, write_checkpoint
from .safetensors_writer import SHARD_LIMIT, TensorLayout


def linear_layout(
    stem: str, out_features: int, in_features: int, bits: int, group_size: int
) -> tuple[TensorLayout, ...]:
    """The four tensors of one quantized linear layer; `stem` is its name without `.weight`."""
    groups = 1 if group_size == -1 else -(-in_features // group_size)
    return (
        TensorLayout(f"{stem}.qweight", "I32", (-(-in_features * bits // 32), out_features)),
        TensorLayout(f"{stem}.qzeros", "I32", (groups, -(-out_features * bits // 32))),
        TensorLayout(f"{stem}.g_idx", "I32", (in_features,)),
        TensorLayout(f"{stem}.scales", "F16", (groups, out_features)),
    )


def gptq_layout(spec: ModelSpec, recipe: Recipe) -> Layout:
    """Every tensor of the checkpoint; four of a linear layer's weight."""

    def stored(linear: StoredLinear) -> tuple[TensorLayout, ...]:
        weight, form = linear.linear, recipe.format_of(linear.parts[0].name)
        stem = weight.name.removesuffix(".weight")
        return linear_layout(stem, weight.out_features, weight.in_features, form.bits, form.group_size)

    return checkpoint_layout(spec, stored)


def write_gptq(
    model: QuantizedModel,
    folder: Path,
    *,
    checkpoint_format: CheckpointFormat = "gptq",
    shard_limit: int = SHARD_LIMIT,
    advance: Callable[[int], None] = lambda written: None,
) -> None:
    """Writes the model's tensors into `folder`, as `write_checkpoint` does. Raises `OutputError` also for a
    tensor that is not what the recipe says."""

    def encode(name: str, parts: Mapping[str, AnyQuantized]) -> Mapping[str, NDArray[Any]]:
        tensors = [_checked(part, tensor, model.recipe) for part, tensor in parts.items()]
        bits = model.recipe.format_of(next(iter(parts))).bits
        try:
            arrays = _linear(stacked(tensors), bits, checkpoint_format)
        except QuantizationError as error:
            raise OutputError(f"{name}: {error}") from None
        stem = name.removesuffix(".weight")
        return {f"{stem}.{kind}": array for kind, array in arrays.items()}

    layout = gptq_layout(model.spec, model.recipe)
    write_checkpoint(model, folder, layout, encode, shard_limit=shard_limit, advance=advance)


def _checked(name: str, tensor: AnyQuantized, recipe: Recipe) -> QuantizedTensor:
    if not isinstance(tensor, QuantizedTensor):
        raise OutputError(f"{name}: is in NF4, which the GPTQ format lacks")
    form = recipe.format_of(name)
    if tensor.bits != form.tensor_bits:
        raise OutputError(f"{name}: has {tensor.bits} bits; the recipe says {form.bits}")
    return tensor


def _linear(
    tensor: QuantizedTensor, bits: int, checkpoint_format: CheckpointFormat
) -> dict[str, NDArray[Any]]:
    if bits >= 4:
        return to_gptq(tensor, checkpoint_format)
    parts = to_gptq(tensor, "gptq_v2")
    parts["qweight"], parts["qzeros"] = narrow_gptq(
        parts["qweight"],
        parts["qzeros"],
        bits=bits,
        out_features=tensor.out_features,
        in_features=tensor.in_features,
        checkpoint_format=checkpoint_format,
    )
    return parts
