"""ggml's blocks against the gguf package, which decodes them by itself."""

from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from nybble.errors import ModelFormatError
from nybble.quant.packing_ggml import BLOCK_BYTES, GgmlType, from_ggml

KINDS: tuple[GgmlType, ...] = get_args(GgmlType)


def random_blocks(kind: GgmlType, rows: int, blocks: int, seed: int) -> NDArray[np.uint8]:
    """Any bytes, with scales and minima of any finite value: negative, subnormal, zero, the largest."""
    random = np.random.default_rng(seed)
    raw = random.integers(0, 256, (rows, blocks, BLOCK_BYTES[kind]), dtype=np.uint8)
    floats = raw[..., : 4 if kind == "Q4_1" else 2].view(np.float16)
    floats[~np.isfinite(floats)] = -65504
    return raw.reshape(rows, -1)


@given(
    kind=st.sampled_from(KINDS), rows=st.integers(1, 20), blocks=st.integers(1, 5), seed=st.integers(0, 999)
)
def test_the_weights_are_those_of_the_gguf_package(kind: GgmlType, rows: int, blocks: int, seed: int) -> None:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    raw = random_blocks(kind, rows, blocks, seed)
    tensor = from_ggml(raw, kind)
    assert np.array_equal(tensor.dequantize(), dequantize(raw, GGMLQuantizationType[kind]))
    assert (tensor.out_features, tensor.in_features, tensor.group_size) == (rows, blocks * 32, 32)
    assert tensor.bits == (8 if kind == "Q8_0" else 4)
    assert (tensor.minima is None) == (kind != "Q4_1")
    assert tensor.zeros is None
    # The same bits: 16 or 8 of scales and minima, and the integers.
    assert tensor.nbytes == raw.nbytes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_scale_that_is_not_finite_is_refused(kind: GgmlType, value: float) -> None:
    raw = random_blocks(kind, 3, 2, 0)
    at = BLOCK_BYTES[kind] + (2 if kind == "Q4_1" else 0)  # of the second block, its last float
    raw[1, at : at + 2] = np.array([value], np.float16).view(np.uint8)
    with pytest.raises(ModelFormatError, match="layer 3: holds a NaN or an infinity"):
        from_ggml(raw, kind, "layer 3")
