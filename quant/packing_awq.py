"""AWQ's layout for its "gemm" kernels, as AutoAWQ writes it (https://github.com/casper-hansen/AutoAWQ)."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelFormatError
from .packing import QuantizedTensor, pack_rows

PER_WORD = 8
# The output that each nibble of an int32 is of, the lowest nibble first.
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def from_awq(
    qweight: NDArray[Any],
    qzeros: NDArray[Any],
    scales: NDArray[Any],
    *,
    group_size: int,
    name: str = "tensor",
) -> QuantizedTensor:
    """A 4-bit weight of outputs that are a multiple of 8: `w[n, k] = (code - zero) * scale`.

    - `qweight` int32 [in, out / 8]; `qzeros` int32 [groups, out / 8]: eight outputs a word, in `ORDER`;
    - `scales` float16 [groups, out].

    `group_size` may be -1. Raises `ModelFormatError` naming `name` for dtypes or shapes that contradict each
    other, and scales that are not finite.
    """

    def check(ok: bool, what: str, found: object, expected: object) -> None:
        if not ok:
            raise ModelFormatError(f"{name}: {what} is {found}; expected {expected}")

    for part, array, dtype in (
        ("qweight", qweight, np.int32),
        ("qzeros", qzeros, np.int32),
        ("scales", scales, np.float16),
    ):
        check(array.dtype == dtype, f"dtype of {part}", array.dtype, np.dtype(dtype))
        check(array.ndim == 2, f"shape of {part}", list(array.shape), "two dimensions")
    columns, words = qweight.shape
    check(columns > 0, "input size", columns, "at least 1")
    size = columns if group_size == -1 else group_size
    groups, out = -(-columns // size), words * PER_WORD
    check(scales.shape == (groups, out), "shape of scales", list(scales.shape), [groups, out])
    check(qzeros.shape == (groups, words), "shape of qzeros", list(qzeros.shape), [groups, words])
    check(bool(np.isfinite(scales).all()), "a scale", "infinite or NaN", "finite scales")
    zeros = np.ascontiguousarray(unpack_awq(qzeros).T)
    return QuantizedTensor(
        pack_rows(np.ascontiguousarray(unpack_awq(qweight).T), 4),
        np.ascontiguousarray(scales.T),
        None if (zeros == 8).all() else zeros,
        4,
        size,
        columns,
    )


def unpack_awq(words: NDArray[Any]) -> NDArray[np.uint8]:
    """[rows, words] int32 to [rows, words * 8] codes."""
    nibbles = np.asarray(words).view(np.uint32)[:, :, None] >> (4 * np.arange(PER_WORD, dtype=np.uint32))
    codes = np.empty(nibbles.shape, np.uint8)
    codes[:, :, ORDER] = nibbles & 15
    return codes.reshape(len(codes), -1)
