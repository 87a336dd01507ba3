"""bitsandbytes' two methods, each weight by itself and without calibration."""

from typing import TYPE_CHECKING

import numpy as np

from ..errors import QuantizationError, UnsupportedModelError
from .packing import LARGEST_F16, QuantizedTensor, pack_rows
from .packing_bnb import INT8_LEVELS
from .packing_nf4 import NF4_CODE_BOOK, Nf4Tensor
from .rtn import check_finite
from .scales import SMALLEST_SCALE

if TYPE_CHECKING:
    from torch import Tensor


def quantize_nf4(weight: "Tensor", blocksize: int, name: str) -> Nf4Tensor:
    """A weight [out, in] float32 in NF4: each block of `blocksize` inputs over its largest magnitude, rounded
    to float16 first, to the nearest entry of the code book. Raises `UnsupportedModelError` naming the tensor
    where blocks would run across rows, `QuantizationError` for what float16 cannot scale."""
    import torch

    check_finite(weight, name)
    out, columns = weight.shape
    if columns % blocksize:
        raise UnsupportedModelError(
            f"{name}: has rows of {columns}; method nf4 has whole blocks of {blocksize} in a row: "
            "use method rtn or gptq"
        )
    blocks = weight.reshape(out, -1, blocksize)
    scales = _f16_scales(blocks.abs().amax(dim=2), name)
    middles = torch.from_numpy((NF4_CODE_BOOK[1:] + NF4_CODE_BOOK[:-1]) / 2)
    codes = torch.bucketize(blocks / scales[..., None], middles).to(torch.uint8)
    packed = pack_rows(codes.reshape(out, columns).numpy(), 4)
    return Nf4Tensor(packed, scales.numpy().astype(np.float16), blocksize, columns)


def quantize_int8(weight: "Tensor", name: str) -> QuantizedTensor:
    """A weight [out, in] float32 in 8 bits with one scale a row, its largest magnitude / 127 rounded to
    float16; nearest, ties to even. Raises `QuantizationError` for what float16 cannot scale."""
    import torch

    check_finite(weight, name)
    scales = _f16_scales(weight.abs().amax(dim=1, keepdim=True) / INT8_LEVELS, name)
    codes = torch.round(weight / scales).clamp_(-INT8_LEVELS, INT8_LEVELS).to(torch.int8)
    packed = codes.numpy().view(np.uint8) ^ np.uint8(128)
    columns = weight.shape[1]
    return QuantizedTensor(packed, scales.numpy().astype(np.float16), None, 8, columns, columns)


def _f16_scales(scales: "Tensor", name: str) -> "Tensor":
    """Rounded to float16; 1 for zeros, and not less than float16's smallest number."""
    import torch

    if float(scales.max()) > LARGEST_F16:
        raise QuantizationError(f"{name}: reaches {float(scales.max()):g}; its scale leaves float16's range")
    rounded = scales.half().float().clamp_(min=SMALLEST_SCALE)
    return torch.where(scales == 0, 1.0, rounded)
