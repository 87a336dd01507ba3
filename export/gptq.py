"""The GPTQ half of an artifact: `model.safetensors` in the AutoGPTQ layout, which GPTQModel, transformers and
vLLM load."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import OutputError, QuantizationError
from ..models.spec import ModelSpec
from ..quant.model import QuantizedModel
from ..quant.packing import CheckpointFormat, QuantizedTensor, to_gptq
from ..quant.packing_narrow import narrow_gptq
from ..quant.packing_rows import stacked
from ..quant.recipe import Recipe
from .safetensors_writer import SHARD_LIMIT, ShardPlan, TensorLayout, plan_shards, write_shards


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


def gptq_layout(spec: ModelSpec, recipe: Recipe) -> dict[str, tuple[TensorLayout, ...]]:
    """Every tensor of the checkpoint, by its name in an unquantized one: four for a linear layer's weight,
    one in float16 for anything else. In the order data meets them."""
    linears = {x.linear.name for layer in range(spec.num_layers) for x in spec.stored_linears(layer)}
    formats = {rows.name: recipe.format_of(source) for source, rows in spec.stored_rows().items()}
    layout = {}
    for name, shape in spec.stored_tensors().items():
        if name in linears:
            stem, form = name.removesuffix(".weight"), formats[name]
            layout[name] = linear_layout(stem, shape[0], shape[1], form.bits, form.group_size)
        else:
            layout[name] = (TensorLayout(name, "F16", shape),)
    return layout


def plan_gptq(spec: ModelSpec, recipe: Recipe, limit: int = SHARD_LIMIT) -> tuple[ShardPlan, ...]:
    """The files of the checkpoint and their tensors; their sizes are known before anything is written."""
    return plan_shards(gptq_layout(spec, recipe).values(), limit)


def write_gptq(
    model: QuantizedModel,
    folder: Path,
    *,
    checkpoint_format: CheckpointFormat = "gptq",
    shard_limit: int = SHARD_LIMIT,
    advance: Callable[[int], None] = lambda written: None,
) -> None:
    """Writes the model's tensors into `folder`, tensor by tensor, and the index where there are several
    files. `advance` is told the bytes of each tensor when it is written. Raises `OutputError` for a tensor
    that is missing or is not what the recipe says, `OSError` from the disk."""
    layout = gptq_layout(model.spec, model.recipe)
    sources: dict[str, list[str]] = {}
    for name, rows in model.spec.stored_rows().items():
        sources.setdefault(rows.name, []).append(name)
    write_shards(
        folder,
        layout,
        lambda name: _parts(model, name, sources[name], checkpoint_format),
        shard_limit,
        advance,
    )


def _parts(
    model: QuantizedModel, name: str, sources: Sequence[str], checkpoint_format: CheckpointFormat
) -> dict[str, NDArray[Any]]:
    """What the checkpoint holds of its tensor `name`, whose rows are the model's tensors `sources`."""
    quantized: list[QuantizedTensor] = []
    plain: list[NDArray[np.float16]] = []
    for source in sources:
        tensor = model.tensors.get(source)
        if tensor is None:
            raise OutputError(f"{source}: is missing from the quantized model")
        if isinstance(tensor, np.ndarray):
            plain.append(tensor.astype(np.float16, copy=False))
            continue
        if not isinstance(tensor, QuantizedTensor):
            raise OutputError(f"{source}: is in NF4, which the GPTQ format lacks")
        form = model.recipe.format_of(source)
        if tensor.bits != form.tensor_bits:
            raise OutputError(f"{source}: has {tensor.bits} bits; the recipe says {form.bits}")
        quantized.append(tensor)
    if plain:
        return {name: plain[0] if len(plain) == 1 else np.concatenate(plain)}
    stem = name.removesuffix(".weight")
    try:
        parts = _linear(stacked(quantized), model.recipe.format_of(sources[0]).bits, checkpoint_format)
    except QuantizationError as error:
        raise OutputError(f"{name}: {error}") from None
    return {f"{stem}.{part}": array for part, array in parts.items()}


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
