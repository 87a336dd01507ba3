"""Writes the half of an artifact that is a checkpoint, however its linear layers are stored."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import OutputError
from ..models.spec import ModelSpec, StoredLinear
from ..quant.model import QuantizedModel
from ..quant.packing_nf4 import AnyQuantized
from .safetensors_writer import TensorLayout, write_shards

# What is stored of each tensor, by its name in an unquantized checkpoint.
Layout = dict[str, tuple[TensorLayout, ...]]
# Of a tensor of that name, whose rows are the model's tensors, by their names: the arrays that are stored.
Encode = Callable[[str, Mapping[str, AnyQuantized]], Mapping[str, NDArray[Any]]]


def checkpoint_layout(
    spec: ModelSpec, linear_layout: Callable[[StoredLinear], tuple[TensorLayout, ...]]
) -> Layout:
    """Every tensor of the checkpoint: a linear layer's weight as `linear_layout` has it, anything else in
    float16. In the order data meets them."""
    linears = {x.linear.name: x for layer in range(spec.num_layers) for x in spec.stored_linears(layer)}
    return {
        name: linear_layout(linears[name]) if name in linears else (TensorLayout(name, "F16", shape),)
        for name, shape in spec.stored_tensors().items()
    }


def layout_bytes(layout: Layout) -> int:
    """Of all tensors; known before anything is written."""
    return sum(part.nbytes for parts in layout.values() for part in parts)


def write_checkpoint(
    model: QuantizedModel,
    folder: Path,
    layout: Layout,
    encode: Encode,
    *,
    shard_limit: int,
    advance: Callable[[int], None],
) -> None:
    """Writes the model's tensors into `folder`, tensor by tensor, and the index where there are several
    files. `advance` is told the bytes of each tensor when it is written. Raises `OutputError` for a tensor
    that is missing or is not what the layout says, `OSError` from the disk."""
    sources: dict[str, list[str]] = {}
    for name, rows in model.spec.stored_rows().items():
        sources.setdefault(rows.name, []).append(name)

    def parts(name: str) -> Mapping[str, NDArray[Any]]:
        plain: list[NDArray[np.float16]] = []
        quantized: dict[str, AnyQuantized] = {}
        for source in sources[name]:
            tensor = model.tensors.get(source)
            if tensor is None:
                raise OutputError(f"{source}: is missing from the quantized model")
            if isinstance(tensor, np.ndarray):
                plain.append(tensor.astype(np.float16, copy=False))
            else:
                quantized[source] = tensor
        if plain:
            return {name: plain[0] if len(plain) == 1 else np.concatenate(plain)}
        return encode(name, quantized)

    write_shards(folder, layout, parts, shard_limit, advance)
