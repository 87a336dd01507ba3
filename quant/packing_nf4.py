"""NF4: 4-bit codes that index a code book (Dettmers et al. 2023, QLoRA, https://arxiv.org/abs/2305.14314)."""

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelFormatError, UnsupportedModelError
from ..records import dataclass
from .packing import QuantizedTensor, pack_rows, round_to_f16, row_blocks, unpack_rows

# The paper's appendix E: quantiles of a normal distribution, scaled to [-1, 1].
NF4_CODE_BOOK = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Nf4Tensor:
    """A weight [out_features, in_features] as codes: `w[n, k] = NF4_CODE_BOOK[code[n, k]] * scale[n, g]`,
    with `g = k // group_size`."""

    packed: NDArray[np.uint8]  # [out, ceil(in / 2)], low nibble first
    scales: NDArray[np.float16]  # [out, groups], each group's largest magnitude
    group_size: int
    in_features: int
    bits: ClassVar[int] = 4
    permutation: ClassVar[None] = None

    @property
    def out_features(self) -> int:
        return int(self.packed.shape[0])

    @property
    def groups(self) -> int:
        return -(-self.in_features // self.group_size)

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scales.nbytes

    def dequantize(self) -> NDArray[np.float32]:
        """The weight the codes stand for, [out, in] float32."""
        group = np.arange(self.in_features) // self.group_size
        weight = np.empty((self.out_features, self.in_features), np.float32)
        for rows in row_blocks(self.out_features, self.in_features):
            codes = unpack_rows(self.packed[rows], self.bits, self.in_features)
            np.multiply(NF4_CODE_BOOK[codes], self.scales[rows][:, group], out=weight[rows])
        return weight


AnyQuantized = QuantizedTensor | Nf4Tensor


def from_nf4(
    codes: NDArray[np.uint8], absmax: NDArray[np.float32], blocksize: int = 64, name: str = "tensor"
) -> Nf4Tensor:
    """bitsandbytes' form (https://github.com/bitsandbytes-foundation/bitsandbytes): `codes` [out, in], each
    under 16, and an `absmax` for each block of `blocksize` codes, counted over the rows one after another.
    Scales are `absmax` rounded to float16.

    Raises `UnsupportedModelError` where blocks run across rows, `ModelFormatError` for another number of
    blocks or a code of 16 and up, `QuantizationError` for an `absmax` that float16 lacks; each names `name`.
    """
    out, columns = codes.shape
    if blocksize < 1 or columns % blocksize:
        raise UnsupportedModelError(
            f"{name}: blocks of {blocksize} in rows of {columns}; expected whole blocks in a row"
        )
    if absmax.shape != (out * columns // blocksize,):
        raise ModelFormatError(
            f"{name}: absmax has shape {list(absmax.shape)}; expected [{out * columns // blocksize}]"
        )
    if codes.max(initial=0) > 15:
        raise ModelFormatError(f"{name}: holds the code {codes.max()}; expected 0 to 15")
    scales = round_to_f16(absmax.reshape(out, -1), name)
    return Nf4Tensor(pack_rows(codes, 4), scales, blocksize, columns)
