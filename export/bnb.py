"""The bitsandbytes half of an artifact: `model.safetensors` in NF4 or 8 bits, which transformers loads with
bitsandbytes."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import OutputError
from ..models.spec import ModelSpec, StoredLinear
from ..quant.model import QuantizedModel
from ..quant.packing import QuantizedTensor
from ..quant.packing_bnb import STATE, Nf4State, to_bnb_int8, to_bnb_nf4
from ..quant.packing_nf4 import AnyQuantized, Nf4Tensor
from ..quant.packing_rows import stacked
from ..quant.recipe import Recipe
from .checkpoint_writer import Layout, checkpoint_layout, write_checkpoint
from .safetensors_writer import SHARD_LIMIT, TensorLayout


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


def bnb_layout(spec: ModelSpec, recipe: Recipe) -> Layout:
    """Every tensor of the checkpoint; a linear layer's weight comes with what decodes it."""

    def stored(linear: StoredLinear) -> tuple[TensorLayout, ...]:
        weight = linear.linear
        if recipe.method == "nf4":
            return nf4_layout(weight.name, weight.out_features, weight.in_features, recipe.group_size)
        return int8_layout(weight.name, weight.out_features, weight.in_features)

    return checkpoint_layout(spec, stored)


def write_bnb(
    model: QuantizedModel,
    folder: Path,
    *,
    shard_limit: int = SHARD_LIMIT,
    advance: Callable[[int], None] = lambda written: None,
) -> None:
    """Writes the model's tensors into `folder`, as `write_checkpoint` does."""
    layout = bnb_layout(model.spec, model.recipe)
    write_checkpoint(model, folder, layout, _encode, shard_limit=shard_limit, advance=advance)


def _encode(name: str, parts: Mapping[str, AnyQuantized]) -> Mapping[str, NDArray[Any]]:
    nf4 = [tensor for tensor in parts.values() if isinstance(tensor, Nf4Tensor)]
    if len(nf4) == len(parts):
        packed = np.concatenate([tensor.packed for tensor in nf4])
        scales = np.concatenate([tensor.scales for tensor in nf4])
        whole = Nf4Tensor(packed, scales, nf4[0].group_size, nf4[0].in_features)
        return {name + kind: array for kind, array in to_bnb_nf4(whole).items()}
    int8 = [_checked(part, tensor) for part, tensor in parts.items()]
    stem = name.removesuffix("weight")
    return {stem + kind: array for kind, array in to_bnb_int8(stacked(int8)).items()}


def _checked(name: str, tensor: AnyQuantized) -> QuantizedTensor:
    if (
        not isinstance(tensor, QuantizedTensor)
        or tensor.bits != 8
        or tensor.zeros is not None
        or tensor.groups != 1
        or tensor.permutation is not None
    ):
        raise OutputError(f"{name}: is not in 8 bits with one scale a row, which bitsandbytes has")
    return tensor
