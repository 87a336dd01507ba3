"""Arrays damaged in every way that an argument can be wrong."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

DTYPES = ("int8", "uint8", "int16", "uint32", "int64", "float16", "float32", "float64", "complex64", "bool")
OTHER_TYPES = (None, 7, 1.5, "text", b"bytes", [1, 2])


@dataclass(frozen=True)
class Rule:
    """What an array argument may be: `low` to `end` - 1 where its values are checked, and the axes along
    which another length breaks the contract."""

    low: int | None = None
    end: int | None = None
    axes: tuple[int, ...] = (0,)


@st.composite
def malformed(draw: st.DrawFn, array: NDArray[Any], rule: Rule, optional: bool = False) -> tuple[str, Any]:
    """A kind of damage, and `array` with it."""
    kinds = ["dtype", "type", "dimensions", "stride"]
    kinds += ["byte order"] if array.dtype.itemsize > 1 else []
    kinds += ["length"] if rule.axes else []
    kinds += ["value"] if rule.low is not None else []
    kind = draw(st.sampled_from(kinds))
    if kind == "dtype":
        return kind, array.astype(draw(st.sampled_from([d for d in DTYPES if d != array.dtype.name])))
    if kind == "type":
        return kind, draw(st.sampled_from(OTHER_TYPES[1:] if optional else OTHER_TYPES))
    if kind == "byte order":
        return kind, array.astype(array.dtype.newbyteorder())
    if kind == "dimensions":
        return kind, draw(st.sampled_from([array[None], array[..., None], array[0]]))
    if kind == "stride":
        doubled = np.repeat(array, 2, axis=-1)[..., ::2]
        return kind, draw(st.sampled_from([doubled, doubled[..., ::-1]]))
    if kind == "length":
        axis = draw(st.sampled_from(rule.axes))
        count = draw(st.integers(0, 2 * array.shape[axis]).filter(lambda n: n != array.shape[axis]))
        return kind, np.ascontiguousarray(np.resize(array, _with_axis(array.shape, axis, count)))
    assert rule.low is not None
    assert rule.end is not None
    values = st.one_of(st.integers(-(1 << 31), rule.low - 1), st.integers(rule.end, (1 << 31) - 1))
    damaged = array.copy()
    damaged.flat[draw(st.integers(0, array.size - 1))] = draw(values)
    return kind, damaged


def _with_axis(shape: tuple[int, ...], axis: int, count: int) -> tuple[int, ...]:
    return (*shape[:axis], count, *shape[axis + 1 :])
