"""GPTQ against an independent float64 implementation, and what it promises."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from nybble.errors import QuantizationError
from nybble.quant import gptq, statistics
from nybble.quant.packing import QuantizedTensor, to_gptq
from nybble.quant.recipe import Recipe
from nybble.quant.rtn import quantize_rtn

torch = pytest.importorskip("torch")

PLAIN = Recipe(group_size=32, clip_search=False, act_order="none")


def correlated_inputs(tokens: int, columns: int, seed: int = 0) -> NDArray[np.float32]:
    random = np.random.default_rng(seed)
    mixed = random.normal(size=(tokens, columns)) @ random.normal(size=(columns, columns)) * columns**-0.5
    common = random.normal(size=(tokens, 4)) @ random.normal(size=(4, columns))
    return (mixed + common).astype(np.float32) * random.uniform(0.2, 3, columns).astype(np.float32)


def random_weight(out: int, columns: int, seed: int = 1) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=(out, columns)).astype(np.float32)


def quantize(
    weight: NDArray[np.float32], inputs: NDArray[np.float32], recipe: Recipe, name: str = "w"
) -> QuantizedTensor:
    hessian = statistics.hessian(torch.from_numpy(inputs))
    (result,) = gptq.quantize_gptq([torch.from_numpy(weight)], hessian, recipe, [name])
    return result


def output_error(
    weight: NDArray[np.float32], quantized: QuantizedTensor, inputs: NDArray[np.float32]
) -> float:
    change = inputs.astype(np.float64) @ (quantized.dequantize() - weight).T.astype(np.float64)
    return float((change**2).mean() / ((inputs.astype(np.float64) @ weight.T) ** 2).mean())


def gptq_by_the_book(
    weight: NDArray[np.float32], inputs: NDArray[np.float32], recipe: Recipe
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The update of Optimal Brain Quantization (the paper's equation 2), one column at a time, with the
    inverse of the remaining columns' Hessian computed anew for each: codes [out, in] in the order in which
    the columns are stored, and that order."""
    w, x = weight.astype(np.float64), inputs.astype(np.float64)
    columns, top = w.shape[1], 2**recipe.bits - 1
    size = columns if recipe.group_size == -1 else recipe.group_size
    h = x.T @ x / len(x)
    order = np.arange(columns) if recipe.act_order == "none" else np.argsort(-np.diag(h), kind="stable")
    h += recipe.damp * np.diag(h).mean() * np.eye(columns)

    def grid(group: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        low, high = np.minimum(group.min(1), 0), np.maximum(group.max(1), 0)
        if recipe.symmetric:
            scale = np.maximum(-low, high) / (top / 2)
            return scale.astype(np.float16).astype(np.float64), np.full(len(w), 2.0 ** (recipe.bits - 1))
        scale = np.maximum((high - low) / top, high / (top - 1)).astype(np.float16).astype(np.float64)
        return scale, np.clip(np.rint(-low / scale), 1, top)

    static = {g: grid(w[:, g * size : (g + 1) * size]) for g in range(-(-columns // size))}
    codes = np.zeros(w.shape, np.int64)
    for position, column in enumerate(order):
        if recipe.act_order == "static":
            scale, zero = static[column // size]
        elif position % size == 0:
            scale, zero = grid(w[:, order[position : position + size]])
        codes[:, position] = np.clip(np.rint(w[:, column] / scale) + zero, 0, top)
        rounded = (codes[:, position] - zero) * scale
        rest = order[position:]
        inverse = np.linalg.inv(h[np.ix_(rest, rest)])
        w[:, rest] -= np.outer((w[:, column] - rounded) / inverse[0, 0], inverse[0])
    return codes, order


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("act_order", "group_size"), [("none", 32), ("none", -1), ("static", 32), ("static", 64), ("dynamic", 32)]
)
def test_equals_the_paper_in_float64(bits: int, symmetric: bool, act_order: str, group_size: int) -> None:
    recipe = replace(PLAIN, bits=bits, symmetric=symmetric, act_order=act_order, group_size=group_size)
    weight, inputs = random_weight(12, 80), correlated_inputs(400, 80)
    codes, order = gptq_by_the_book(weight, inputs, recipe)
    result = quantize(weight, inputs, recipe)
    if act_order == "static":
        codes = codes[:, np.argsort(order)]
    # A weight within float32's error of the middle between two codes may go either way, and takes the rest
    # of its row with it; none does here.
    assert np.array_equal(result.codes, codes)
    if act_order == "dynamic":
        assert result.permutation is not None
        assert np.array_equal(result.permutation, order)
    else:
        assert result.permutation is None


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [32, 128, -1])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("act_order", ["static", "dynamic", "none"])
def test_beats_rounding_on_correlated_inputs(
    bits: int, group_size: int, symmetric: bool, act_order: str
) -> None:
    recipe = Recipe(bits=bits, group_size=group_size, symmetric=symmetric, act_order=act_order)  # type: ignore[arg-type]
    weight, inputs = random_weight(48, 200), correlated_inputs(1000, 200)
    result = quantize(weight, inputs, recipe)
    assert result.groups == -(-200 // result.group_size)
    assert result.scales.shape == (48, result.groups)
    rounded = quantize_rtn(torch.from_numpy(weight), recipe, "w")
    assert output_error(weight, result, inputs) < 0.6 * output_error(weight, rounded, inputs)


def test_clip_search_lowers_the_weighted_error() -> None:
    weight, inputs = random_weight(48, 256), correlated_inputs(1000, 256)
    importance = (inputs.astype(np.float64) ** 2).mean(0)
    errors = {}
    for search in (True, False):
        scales, zeros = gptq.all_scales(
            torch.from_numpy(np.ascontiguousarray(weight.T)),
            torch.from_numpy(importance).float(),
            64,
            4,
            True,
            search,
        )
        group = np.arange(256) // 64
        scale, zero = scales.numpy()[group].T.astype(np.float64), zeros.numpy()[group].T
        codes = np.clip(np.rint(weight / scale) + zero, 0, 15)
        errors[search] = (((codes - zero) * scale - weight) ** 2 * importance).sum(1)
    assert (errors[True] <= errors[False] * (1 + 1e-5)).all()
    assert errors[True].mean() < 0.9 * errors[False].mean()


def test_stacked_layers_equal_single_ones() -> None:
    inputs = correlated_inputs(500, 96)
    weights = [random_weight(out, 96, seed) for seed, out in enumerate((32, 8, 8))]
    hessian = statistics.hessian(torch.from_numpy(inputs))
    together = gptq.quantize_gptq([torch.from_numpy(w) for w in weights], hessian, Recipe(), ["q", "k", "v"])
    for weight, result in zip(weights, together, strict=True):
        alone = quantize(weight, inputs, Recipe())
        assert np.array_equal(result.packed, alone.packed)
        assert np.array_equal(result.scales, alone.scales)


def test_desc_act_writes_the_columns_groups() -> None:
    inputs = correlated_inputs(500, 100)
    result = quantize(random_weight(16, 100), inputs, Recipe(act_order="dynamic", group_size=32))
    falling = np.argsort(-(inputs.astype(np.float64) ** 2).sum(0), kind="stable")
    expected = np.empty(100, np.int64)
    expected[falling] = np.arange(100) // 32
    assert np.array_equal(to_gptq(result)["g_idx"], expected)


def test_hessian_is_the_mean_outer_product() -> None:
    inputs = correlated_inputs(1000, 150)
    found = statistics.hessian(torch.from_numpy(inputs), tokens=300, columns=64).numpy()
    exact = inputs.T.astype(np.float64) @ inputs / 1000
    assert np.abs(found - exact).max() < 1e-5 * np.abs(exact).max()
    assert np.array_equal(found, found.T)


def test_dead_columns_are_rounded_by_themselves() -> None:
    weight, inputs = random_weight(8, 64), correlated_inputs(500, 64)
    inputs[:, [3, 40]] = 0
    result = quantize(weight, inputs, PLAIN)
    step = result.scales.astype(np.float32).repeat(32, axis=1)
    change = np.abs(result.dequantize() - weight)[:, [3, 40]]
    assert (change <= 0.51 * step[:, [3, 40]]).all()


def test_inputs_of_zeros() -> None:
    weight = random_weight(8, 64)
    result = quantize(weight, np.zeros((10, 64), np.float32), Recipe())
    assert np.abs(result.dequantize() - weight).max() < 1


def test_weights_of_zeros_stay_zeros() -> None:
    weight = np.zeros((8, 64), np.float32)
    for recipe in (Recipe(), Recipe(symmetric=False), Recipe(bits=8)):
        assert not quantize(weight, correlated_inputs(100, 64), recipe).dequantize().any()
        assert not quantize_rtn(torch.from_numpy(weight), recipe, "w").dequantize().any()


def test_damping_rises_until_the_hessian_can_be_factored() -> None:
    base = torch.eye(64)
    base[0, 1] = base[1, 0] = 1.05  # an eigenvalue of -0.05: 0.01 is too little, 0.1 enough
    damped, lower = gptq.factored(base.flip(0, 1), 0.01)
    np.testing.assert_allclose((lower @ lower.T).numpy(), damped.numpy(), atol=1e-6)
    factor = gptq.inverse_factor(lower)
    expected = np.linalg.inv(base.numpy().astype(np.float64) + 0.1 * np.eye(64))
    assert np.abs((factor.T @ factor).numpy() - expected).max() < 1e-3


def test_a_hessian_that_no_damping_helps_names_the_tensor() -> None:
    hessian = torch.eye(64)
    hessian[0, 1] = hessian[1, 0] = 100.0
    with pytest.raises(QuantizationError, match=r"q_proj\.weight and k_proj\.weight: its Hessian") as caught:
        gptq.quantize_gptq(
            [torch.ones(4, 64), torch.ones(4, 64)], hessian, Recipe(), ["q_proj.weight", "k_proj.weight"]
        )
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_name_the_tensor(value: float) -> None:
    weight, inputs = random_weight(8, 64), correlated_inputs(100, 64)
    bad_inputs = inputs.copy()
    bad_inputs[3, 3] = value
    with pytest.raises(QuantizationError, match=r"down\.weight: its input"):
        quantize(weight, bad_inputs, Recipe(), "down.weight")
    weight[5, 7] = value
    with pytest.raises(QuantizationError, match=r"down\.weight: element \[5, 7\] is"):
        quantize(weight, inputs, Recipe(), "down.weight")
    with pytest.raises(QuantizationError, match=r"down\.weight: element \[5, 7\] is"):
        quantize_rtn(torch.from_numpy(weight), Recipe(), "down.weight")


def test_a_scale_beyond_float16_names_the_tensor() -> None:
    weight = random_weight(8, 64) * np.float32(1e6)
    with pytest.raises(QuantizationError, match=r"down\.weight: a group reaches"):
        quantize(weight, correlated_inputs(100, 64), Recipe(), "down.weight")
    with pytest.raises(QuantizationError, match=r"down\.weight: a group reaches"):
        quantize_rtn(torch.from_numpy(weight), Recipe(method="rtn"), "down.weight")


def test_relative_error_is_the_outputs() -> None:
    weight, inputs = random_weight(16, 96), correlated_inputs(700, 96)
    result = quantize(weight, inputs, Recipe())
    found = gptq.relative_error(
        torch.from_numpy(weight),
        torch.from_numpy(result.dequantize()),
        statistics.hessian(torch.from_numpy(inputs)),
    )
    assert found == pytest.approx(output_error(weight, result, inputs), rel=1e-3)
