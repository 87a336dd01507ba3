"""Round to nearest against numpy in float64."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nybble.quant.recipe import Recipe
from nybble.quant.rtn import quantize_rtn

torch = pytest.importorskip("torch")


@settings(deadline=None)
@given(
    bits=st.sampled_from([4, 8]),
    group_size=st.sampled_from([32, 64, 128, -1]),
    symmetric=st.booleans(),
    columns=st.integers(1, 200),
    shift=st.sampled_from([-5.0, 0.0, 5.0]),
    seed=st.integers(0, 100),
)
def test_codes_are_nearest_to_the_weight(
    bits: int, group_size: int, symmetric: bool, columns: int, shift: float, seed: int
) -> None:
    recipe = Recipe("rtn", bits=bits, group_size=group_size, symmetric=symmetric, clip_search=False)
    weight = (np.random.default_rng(seed).normal(size=(9, columns)) + shift).astype(np.float32)
    result = quantize_rtn(torch.from_numpy(weight), recipe, "w")
    top = 2**bits - 1
    assert (result.zeros is None) == symmetric
    assert (result.zero_points >= 1).all()
    size = columns if group_size == -1 else group_size
    for g, start in enumerate(range(0, columns, size)):
        group = weight[:, start : start + size].astype(np.float64)
        scale, zero = result.scales[:, g].astype(np.float64), result.zero_points[:, g].astype(np.float64)
        exact = group / scale[:, None] + zero[:, None]
        codes = result.codes[:, start : start + size]
        assert (np.abs(codes - np.clip(exact, 0, top)) <= 0.501).all()
        # The range reaches the extremes: nothing is cut by much more than half a step.
        assert exact.max() <= top + 1.01
        assert exact.min() >= -1.01


@pytest.mark.parametrize("symmetric", [True, False])
def test_clip_search_lowers_the_error(symmetric: bool) -> None:
    weight = torch.from_numpy(np.random.default_rng(0).standard_t(4, size=(64, 256)).astype(np.float32))
    errors = []
    for search in (True, False):
        recipe = Recipe("rtn", symmetric=symmetric, clip_search=search)
        change = quantize_rtn(weight, recipe, "w").dequantize() - weight.numpy()
        errors.append((change**2).sum())
    assert errors[0] < 0.95 * errors[1]
