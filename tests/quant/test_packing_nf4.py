"""NF4 against its definition."""

from statistics import NormalDist

import numpy as np
import pytest

from nybble.errors import ModelFormatError, QuantizationError, UnsupportedModelError
from nybble.quant.packing_nf4 import NF4_CODE_BOOK, from_nf4


def test_the_code_book_is_made_of_quantiles_of_a_normal_distribution() -> None:
    """As bitsandbytes builds it: eight positive steps and seven negative ones to the same outermost quantile,
    zero between them, scaled to 1."""
    outermost, quantile = 0.9677083, NormalDist().inv_cdf
    positive = [quantile(p) for p in np.linspace(outermost, 0.5, 9)[:-1]]
    negative = [-quantile(p) for p in np.linspace(outermost, 0.5, 8)[:-1]]
    expected = np.array(sorted([*negative, 0.0, *positive])) / max(positive)
    assert np.allclose(NF4_CODE_BOOK, expected, rtol=0, atol=2e-7)


@pytest.mark.parametrize(("rows", "columns", "blocksize"), [(5, 128, 64), (3, 64, 64), (2, 256, 128)])
def test_the_weights_are_table_entries_times_absmax(rows: int, columns: int, blocksize: int) -> None:
    random = np.random.default_rng(1)
    codes = random.integers(0, 16, (rows, columns)).astype(np.uint8)
    absmax = random.uniform(1e-3, 3, rows * columns // blocksize).astype(np.float32)
    tensor = from_nf4(codes, absmax, blocksize)
    # bitsandbytes counts blocks over the flat weight.
    flat = NF4_CODE_BOOK.astype(np.float64)[codes.reshape(-1)] * np.repeat(absmax, blocksize)
    expected = flat.reshape(rows, columns)
    assert np.allclose(tensor.dequantize(), expected, rtol=2**-11, atol=0)  # absmax in float16
    assert (tensor.out_features, tensor.in_features, tensor.group_size) == (rows, columns, blocksize)
    assert tensor.nbytes == rows * columns // 2 + 2 * absmax.size


def test_what_is_no_nf4_is_refused() -> None:
    codes, absmax = np.zeros((2, 96), np.uint8), np.ones(3, np.float32)
    with pytest.raises(UnsupportedModelError, match="up_proj: blocks of 64 in rows of 96"):
        from_nf4(codes, absmax, 64, "up_proj")
    with pytest.raises(ModelFormatError, match=r"up_proj: absmax has shape \[3\]; expected \[6\]"):
        from_nf4(codes, absmax, 32, "up_proj")
    with pytest.raises(ModelFormatError, match="holds the code 16"):
        from_nf4(codes + np.uint8(16), np.ones(6, np.float32), 32)
    with pytest.raises(QuantizationError, match="up_proj: holds"):
        from_nf4(codes, np.full(6, 7e4, np.float32), 32, "up_proj")
