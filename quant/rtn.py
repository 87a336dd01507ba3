"""Round to nearest: each weight by itself, no calibration text."""

from typing import TYPE_CHECKING

import numpy as np

from ..errors import QuantizationError
from .packing import QuantizedTensor, pack_rows
from .packing_narrow import moved
from .recipe import Recipe
from .scales import all_scales, round_to_grid

if TYPE_CHECKING:
    from torch import Tensor


def quantize_rtn(
    weight: "Tensor", recipe: Recipe, name: str, importance: "Tensor | None" = None
) -> QuantizedTensor:
    """A weight [out, in] float32 rounded to the recipe's grid; with `clip_search` the range of each group is
    the one of least squared error, weighted by `importance` [in] (None is equal weights). Raises
    `QuantizationError` naming the tensor."""
    import torch

    check_finite(weight, name)
    columns = weight.shape[1]
    group_size = resolved_group_size(recipe, columns)
    transposed = weight.T.contiguous()
    try:
        scale, zero = all_scales(
            transposed, importance, group_size, recipe.bits, recipe.symmetric, recipe.clip_search
        )
    except QuantizationError as error:
        raise QuantizationError(f"{name}: {error}") from None
    codes = torch.empty_like(transposed, dtype=torch.uint8)
    for group, start in enumerate(range(0, columns, group_size)):
        part = slice(start, start + group_size)
        codes[part] = round_to_grid(transposed[part], scale[group], zero[group], (1 << recipe.bits) - 1)
    return pack(codes, scale, zero, recipe, group_size, None)


def pack(
    codes: "Tensor",
    scale: "Tensor",
    zero: "Tensor",
    recipe: Recipe,
    group_size: int,
    permutation: "Tensor | None",
) -> QuantizedTensor:
    """A `QuantizedTensor` of codes [in, out] uint8 in stored order, scales and zeros [groups, out]."""
    by = int(moved(recipe.bits))
    codes, zero = codes + by, zero + by
    return QuantizedTensor(
        packed=pack_rows(np.ascontiguousarray(codes.numpy().T), recipe.format.tensor_bits),
        scales=np.ascontiguousarray(scale.numpy().T.astype(np.float16)),
        zeros=None if recipe.symmetric else np.ascontiguousarray(zero.numpy().T.astype(np.uint8)),
        bits=recipe.format.tensor_bits,
        group_size=group_size,
        in_features=codes.shape[0],
        permutation=None if permutation is None else permutation.numpy().astype(np.int32),
    )


def resolved_group_size(recipe: Recipe, in_features: int) -> int:
    """The recipe's group size, with −1 as the whole row."""
    return in_features if recipe.group_size == -1 else recipe.group_size


def check_finite(weight: "Tensor", name: str) -> None:
    """Raises `QuantizationError` naming the tensor and the first value that is not finite."""
    import torch

    finite = torch.isfinite(weight)
    if not finite.all():
        where = [int(i) for i in (~finite).nonzero()[0]]
        raise QuantizationError(
            f"{name}: element {where} is {float(weight[tuple(where)])}; expected finite values"
        )
