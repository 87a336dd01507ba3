"""ggml's blocks of 32 weights that `QuantizedTensor` expresses exactly."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelFormatError
from .packing import QuantizedTensor, pack_rows

GgmlType = Literal["Q4_0", "Q4_1", "Q8_0"]

BLOCK = 32
BLOCK_BYTES: dict[GgmlType, int] = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}


def from_ggml(blocks: NDArray[np.uint8], kind: GgmlType, name: str = "tensor") -> QuantizedTensor:
    """Rows of blocks [out, bytes] as a tensor of group size 32
    (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h):

    | type | a block | a weight |
    |---|---|---|
    | Q4_0 | f16 scale, 16 bytes of nibbles | (code − 8) × scale |
    | Q4_1 | f16 scale, f16 minimum, 16 bytes of nibbles | code × scale + minimum |
    | Q8_0 | f16 scale, 32 int8 | code × scale |

    Low nibbles are a block's first 16 weights, high ones its last. Raises `ModelFormatError` naming `name`
    for a scale or minimum that is infinite or NaN.
    """
    rows, width = blocks.shape
    assert width % BLOCK_BYTES[kind] == 0
    split = blocks.reshape(rows, -1, BLOCK_BYTES[kind])
    columns = split.shape[1] * BLOCK
    floats = 2 if kind == "Q4_1" else 1
    header = np.ascontiguousarray(split[:, :, : 2 * floats]).view("<f2").astype(np.float16, copy=False)
    if not np.isfinite(header).all():
        raise ModelFormatError(f"{name}: holds a NaN or an infinity")
    scales = np.ascontiguousarray(header[:, :, 0])
    data = split[:, :, 2 * floats :]
    if kind == "Q8_0":
        # Signed bytes become codes around 128.
        return QuantizedTensor((data ^ np.uint8(128)).reshape(rows, columns), scales, None, 8, BLOCK, columns)
    halves = (data & np.uint8(15), data >> np.uint8(4))
    packed = pack_rows(np.concatenate(halves, axis=2).reshape(rows, columns), 4)
    minima = np.ascontiguousarray(header[:, :, 1]) if kind == "Q4_1" else None
    return QuantizedTensor(packed, scales, None, 4, BLOCK, columns, minima=minima)
