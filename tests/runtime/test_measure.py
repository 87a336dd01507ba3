"""What benchmarks time is what the decoder computes."""

import numpy as np
import pytest

from nybble._kernels import LinearProduct, multiply, supported_kernels
from nybble.runtime.packed_weights import SYMMETRIC, TILE_ROWS, tiles_bytes

ROWS, COLUMNS, BITS, SLICES_PER_GROUP = 200, 96, 4, 2
PADDED = -(-ROWS // TILE_ROWS) * TILE_ROWS


def random_tiles() -> np.ndarray:
    """Tiles whose scales are small numbers, as binary16 has them with these high bytes."""
    rng = np.random.default_rng(5)
    tiles = rng.integers(0, 256, tiles_bytes(ROWS, COLUMNS, BITS, SYMMETRIC, SLICES_PER_GROUP), np.uint8)
    tile = tiles.reshape(PADDED // TILE_ROWS, -1)
    for header in (0, 32 + SLICES_PER_GROUP * 256):
        tile[:, header + 1 : header + 32 : 2] = 0x20
    return tiles


@pytest.mark.parametrize("isa", supported_kernels())
@pytest.mark.parametrize("tokens", [1, 3, 16, 17, 70])
@pytest.mark.parametrize("threads", [1, 3])
def test_the_product_has_the_bits_of_one_thread(isa: str, tokens: int, threads: int) -> None:
    tiles, rng = random_tiles(), np.random.default_rng(tokens)
    x = rng.standard_normal((tokens, COLUMNS), np.float32)
    expected = np.empty((tokens, PADDED), np.float32)
    multiply(x, tiles, ROWS, BITS, SYMMETRIC, SLICES_PER_GROUP, isa, False, expected)
    y = np.full_like(expected, np.nan)
    product = LinearProduct(threads, isa, x, tiles, ROWS, BITS, SYMMETRIC, SLICES_PER_GROUP, y)
    for repeats in (1, 3):
        y.fill(np.nan)
        assert product.run(repeats) > 0
        assert np.array_equal(y, expected)


def test_arguments_are_checked() -> None:
    tiles, x = random_tiles(), np.ones((4, COLUMNS), np.float32)
    y = np.empty((4, PADDED), np.float32)
    good = (1, "scalar", x, tiles, ROWS, BITS, SYMMETRIC, SLICES_PER_GROUP, y)
    for place, bad, name in (
        (0, 0, "threads"),
        (1, "avx9000", "avx9000"),
        (2, x[:0], "x"),
        (3, tiles[:-1], "tiles"),
        (4, 0, "tiles"),
        (8, y[:2], "y"),
    ):
        arguments = [*good[:place], bad, *good[place + 1 :]]
        with pytest.raises(ValueError, match=name):
            LinearProduct(*arguments)
    for place, other in ((2, x.astype(np.float64)), (3, tiles.astype(np.int8)), (8, y.astype(np.float64))):
        with pytest.raises(TypeError):  # nothing is converted
            LinearProduct(*good[:place], other, *good[place + 1 :])
    with pytest.raises(ValueError, match="repeats"):
        LinearProduct(*good).run(0)
