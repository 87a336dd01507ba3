"""The bitsandbytes half of an artifact: `model.safetensors` in NF4 or 8 bits, which transformers loads with
bitsandbytes."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import OutputError
from ..models.spec import ModelSpec
from ..quant.model import QuantizedModel
from ..quant.packing import QuantizedTensor
from ..quant.packing_bnb import STATE, Nf4State, to_bnb_int8, to_bnb_nf4
from ..quant.packing_nf4 import Nf4Tensor
from ..quant.packing_rows import stacked
from ..quant.recipe import Recipe
from .safetensors_writer import SHARD_LIMIT, ShardPlan, TensorLayout, plan_shards, write_shards


def nf4_layout(name: str, out_features: int, in_features: int, blocksize: int) -> tuple[TensorLayout, ...]:
    """The tensors of one NF4 weight of that name, whose scales are not quantized themselves."""
    state = Nf4State(blocksize, (out_features, in_features))
    return (
        TensorLayout(name, "U8", (out_features * in_features // 2, 1)),
        TensorLayout(f"{name}.absmax", "F32", (state.blocks,)),
        TensorLayout(f"{name}.quant_map", "F32", (16,)),
        TensorLayout(f"{name}.{STATE}", "U8", (len(state.to_bytes()),)),
    )


def int8_layout(name: str, out_features: int, in_features: int) -> tuple[TensorLayout, ...]:
    """The tensors of one 8-bit weight of that name."""
    stem = name.removesuffix(".weight")
    return (
        TensorLayout(name, "I8", (out_features, in_features)),
        TensorLayout(f"{stem}.SCB", "F32", (out_features,)),
        TensorLayout(f"{stem}.weight_format", "U8", ()),
    )


def bnb_layout(spec: ModelSpec, recipe: Recipe) -> dict[str, tuple[TensorLayout, ...]]:
    """Every tensor of the checkpoint, by its name in an unquantized one; what is no linear layer's weight is
    in float16. In the order data meets them."""
    linears = {x.linear.name for layer in range(spec.num_layers) for x in spec.stored_linears(layer)}
    layout: dict[str, tuple[TensorLayout, ...]] = {}
    for name, shape in spec.stored_tensors().items():
        if name not in linears:
            layout[name] = (TensorLayout(name, "F16", shape),)
        elif recipe.method == "nf4":
            layout[name] = nf4_layout(name, shape[0], shape[1], recipe.group_size)
        else:
            layout[name] = int8_layout(name, shape[0], shape[1])
    return layout


def plan_bnb(spec: ModelSpec, recipe: Recipe, limit: int = SHARD_LIMIT) -> tuple[ShardPlan, ...]:
    """The files of the checkpoint and their tensors; their sizes are known before anything is written."""
    return plan_shards(bnb_layout(spec, recipe).values(), limit)


def write_bnb(
    model: QuantizedModel,
    folder: Path,
    *,
    shard_limit: int = SHARD_LIMIT,
    advance: Callable[[int], None] = lambda written: None,
) -> None:
    """Writes the model's tensors into `folder`, as `write_gptq` does."""
    layout = bnb_layout(model.spec, model.recipe)
    sources: dict[str, list[str]] = {}
    for name, rows in model.spec.stored_rows().items():
        sources.setdefault(rows.name, []).append(name)
    write_shards(folder, layout, lambda name: _parts(model, name, sources[name]), shard_limit, advance)


def _parts(model: QuantizedModel, name: str, sources: Sequence[str]) -> dict[str, NDArray[Any]]:
    """What the checkpoint holds of its tensor `name`, whose rows are the model's tensors `sources`."""
    plain: list[NDArray[np.float16]] = []
    nf4: list[Nf4Tensor] = []
    int8: list[QuantizedTensor] = []
    for source in sources:
        tensor = model.tensors.get(source)
        if tensor is None:
            raise OutputError(f"{source}: is missing from the quantized model")
        if isinstance(tensor, np.ndarray):
            plain.append(tensor.astype(np.float16, copy=False))
        elif isinstance(tensor, Nf4Tensor):
            nf4.append(tensor)
        elif tensor.bits == 8 and tensor.zeros is None and tensor.groups == 1 and tensor.permutation is None:
            int8.append(tensor)
        else:
            raise OutputError(f"{source}: is not in 8 bits with one scale a row, which bitsandbytes has")
    if plain:
        return {name: plain[0] if len(plain) == 1 else np.concatenate(plain)}
    if nf4:
        packed = np.concatenate([tensor.packed for tensor in nf4])
        scales = np.concatenate([tensor.scales for tensor in nf4])
        whole = Nf4Tensor(packed, scales, nf4[0].group_size, nf4[0].in_features)
        return {name + part: array for part, array in to_bnb_nf4(whole).items()}
    stem = name.removesuffix("weight")
    return {stem + part: array for part, array in to_bnb_int8(stacked(int8)).items()}
