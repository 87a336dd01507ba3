"""bitsandbytes' layouts of one weight (https://github.com/bitsandbytes-foundation/bitsandbytes): NF4 with or
without a second quantization of its scales, and the rows of LLM.int8()."""

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelFormatError, UnsupportedModelError
from ..models.config_reader import parse_json_object, shown
from ..records import dataclass
from .packing import QuantizedTensor
from .packing_nf4 import NF4_CODE_BOOK, Nf4Tensor, from_nf4

STATE = "quant_state.bitsandbytes__nf4"
# LLM.int8() keeps a row's largest magnitude, which stands for the code 127.
INT8_LEVELS = 127


def swap_nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """bitsandbytes has the first of two codes in the high nibble, a `Nf4Tensor` in the low one."""
    return (packed >> np.uint8(4)) | (packed << np.uint8(4))


@dataclass(frozen=True)
class Nf4State:
    """What bitsandbytes writes as JSON beside a weight of `shape` [out, in]. `nested` is the `absmax`'s own
    quantization, where there is one."""

    blocksize: int
    shape: tuple[int, int]
    nested: "NestedState | None" = None

    @property
    def blocks(self) -> int:
        return self.shape[0] * self.shape[1] // self.blocksize

    def to_bytes(self) -> NDArray[np.uint8]:
        """The tensor of UTF-8 JSON. A `dtype` of float16 is what loaders dequantize to."""
        data = {
            "quant_type": "nf4", "blocksize": self.blocksize, "dtype": "float16", "shape": list(self.shape)
        }  # fmt: skip
        return np.frombuffer(json.dumps(data).encode(), np.uint8)

    @classmethod
    def from_bytes(cls, content: bytes, shape: tuple[int, int], name: str) -> "Nf4State":
        """Checks a state for a weight of `shape`. Raises `ModelFormatError` naming `name` for what is no such
        JSON or contradicts the shape, `UnsupportedModelError` for blocks that run across rows."""
        data = parse_json_object(content, f"{name}: {STATE}")

        def size(key: str) -> int:
            value = data.get(key)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
                raise ModelFormatError(f"{name}: {key} is {shown(value)}; expected a positive size")
            return value

        for key, expected in (("quant_type", "nf4"), ("shape", list(shape))):
            if data.get(key) != expected:
                raise ModelFormatError(f"{name}: {key} is {shown(data.get(key))}; expected {shown(expected)}")
        blocksize = size("blocksize")
        if shape[1] % blocksize:
            raise UnsupportedModelError(
                f"{name}: blocks of {blocksize} in rows of {shape[1]}; expected whole blocks in a row"
            )
        nested = None
        if data.get("nested_blocksize") is not None:
            offset = data.get("nested_offset")
            # Compared, not converted: an integer in JSON may be too long for a float.
            if isinstance(offset, bool) or not isinstance(offset, int | float) or not abs(offset) < 1e9:
                raise ModelFormatError(f"{name}: nested_offset is {shown(offset)}; expected a number")
            nested = NestedState(size("nested_blocksize"), float(offset))
        return cls(blocksize, shape, nested)


@dataclass(frozen=True)
class NestedState:
    """An `absmax` in 8 bits: `quant_map[code] * nested_absmax[code's block] + offset`, in float32."""

    blocksize: int
    offset: float

    def absmax(
        self, codes: NDArray[np.uint8], first: int, quant_map: NDArray[Any], nested_absmax: NDArray[Any]
    ) -> NDArray[np.float32]:
        """The scales that `codes` stand for, [n] float32; the first one is number `first` of all."""
        blocks = np.arange(first, first + len(codes)) // self.blocksize
        with np.errstate(invalid="ignore", over="ignore"):
            values = quant_map[codes] * nested_absmax[blocks] + np.float32(self.offset)
        return np.asarray(values, np.float32)


def to_bnb_nf4(tensor: Nf4Tensor) -> dict[str, NDArray[Any]]:
    """By what follows `X.weight`, for a weight [out, in]:

    - nothing: uint8 [out * in / 2, 1], the codes row after row, the first of two in the high nibble;
    - `.absmax`: float32, one a block; ours are float16 numbers;
    - `.quant_map`: float32 [16], the code book;
    - `.quant_state.bitsandbytes__nf4`: uint8, JSON.
    """
    state = Nf4State(tensor.group_size, (tensor.out_features, tensor.in_features))
    return {
        "": swap_nibbles(tensor.packed).reshape(-1, 1),
        ".absmax": tensor.scales.astype(np.float32).reshape(-1),
        ".quant_map": NF4_CODE_BOOK,
        f".{STATE}": state.to_bytes(),
    }


def from_bnb_nf4(
    packed: NDArray[np.uint8], absmax: NDArray[np.float32], columns: int, blocksize: int, name: str
) -> Nf4Tensor:
    """Whole rows of a weight: bytes [rows * columns / 2, 1] and the `absmax` of their blocks. Scales are
    `absmax` rounded to float16. Raises as `from_nf4` does."""
    low_first = swap_nibbles(packed.reshape(-1, columns // 2))
    codes = np.empty((len(low_first), columns), np.uint8)
    codes[:, 0::2], codes[:, 1::2] = low_first & 15, low_first >> 4
    return from_nf4(codes, absmax, blocksize, name)


def to_bnb_int8(tensor: QuantizedTensor) -> dict[str, NDArray[Any]]:
    """By what follows `X.`, for a symmetric 8-bit weight with one group a row: `weight` int8 [out, in], `SCB`
    float32 [out], 127 scales each, and `weight_format`, a 0 for codes row after row. The product of a float16
    scale and 127 is a float32 exactly."""
    return {
        "weight": (tensor.packed ^ np.uint8(128)).view(np.int8),
        "SCB": tensor.scales[:, 0].astype(np.float32) * INT8_LEVELS,
        "weight_format": np.zeros((), np.uint8),
    }


def from_bnb_int8(codes: NDArray[np.int8], scb: NDArray[np.float32], name: str) -> QuantizedTensor:
    """Rows of a weight, and their `SCB`. Scales are `SCB` / 127, rounded to float16. Raises
    `ModelFormatError` naming `name` for one that float16 lacks."""
    with np.errstate(over="ignore"):
        scales = (scb / np.float32(INT8_LEVELS)).astype(np.float16)
    if not np.isfinite(scales).all():
        raise ModelFormatError(f"{name}: SCB holds a value that is not finite, or past float16's range")
    packed = codes.view(np.uint8) ^ np.uint8(128)
    return QuantizedTensor(packed, scales.reshape(-1, 1), None, 8, codes.shape[1], codes.shape[1])
