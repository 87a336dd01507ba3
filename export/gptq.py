"""The GPTQ half of an artifact: `model.safetensors` in the AutoGPTQ layout, which GPTQModel, transformers and
vLLM load."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import OutputError
from ..models.spec import ModelSpec
from ..quant.model import QuantizedModel
from ..quant.packing import CheckpointFormat, QuantizedTensor, to_gptq
from .safetensors_writer import ShardPlan, ShardWriter, TensorLayout, index_json, plan_shards

SHARD_LIMIT = 4 << 30  # bytes
INDEX_NAME = "model.safetensors.index.json"


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


def gptq_layout(spec: ModelSpec, bits: int, group_size: int) -> dict[str, tuple[TensorLayout, ...]]:
    """Every tensor of the checkpoint, by the model's tensor it stores: four for a linear layer's weight, one
    in float16 for anything else. In the order data meets them."""
    linears = {x.name: x for layer in range(spec.num_layers) for x in spec.linears(layer)}
    layout = {}
    for name, shape in spec.tensors().items():
        if name in linears:
            stem = name.removesuffix(".weight")
            layout[name] = linear_layout(stem, shape[0], shape[1], bits, group_size)
        else:
            layout[name] = (TensorLayout(name, "F16", shape),)
    return layout


def plan_gptq(spec: ModelSpec, bits: int, group_size: int, limit: int = SHARD_LIMIT) -> tuple[ShardPlan, ...]:
    """The files of the checkpoint and their tensors; their sizes are known before anything is written."""
    return plan_shards(gptq_layout(spec, bits, group_size).values(), limit)


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
    recipe = model.recipe
    layout = gptq_layout(model.spec, recipe.bits, recipe.group_size)
    shards = plan_shards(layout.values(), shard_limit)
    source = {part.name: name for name, parts in layout.items() for part in parts}
    for shard in shards:
        writer = ShardWriter(folder, shard)
        try:
            for name in dict.fromkeys(source[t.name] for t in shard.tensors):
                for part, array in _parts(model, name, checkpoint_format).items():
                    advance(writer.put(part, array))
            writer.close()
        except BaseException:
            writer.abandon()
            raise
    if len(shards) > 1:
        (folder / INDEX_NAME).write_text(json.dumps(index_json(shards), indent=2) + "\n", encoding="utf-8")


def _parts(model: QuantizedModel, name: str, checkpoint_format: CheckpointFormat) -> dict[str, NDArray[Any]]:
    tensor = model.tensors.get(name)
    if tensor is None:
        raise OutputError(f"{name}: is missing from the quantized model")
    if isinstance(tensor, QuantizedTensor):
        if tensor.bits != model.recipe.bits:
            raise OutputError(f"{name}: has {tensor.bits} bits; the recipe says {model.recipe.bits}")
        stem = name.removesuffix(".weight")
        return {f"{stem}.{part}": array for part, array in to_gptq(tensor, checkpoint_format).items()}
    return {name: tensor.astype(np.float16, copy=False)}
