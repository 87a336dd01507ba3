"""A budget of bits: the knapsack against brute force, measured sensitivities against what rounding does."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nybble.errors import SettingError
from nybble.models import open_source
from nybble.models.source import ModelSource
from nybble.quant import budget
from nybble.quant.calibration import Calibration
from nybble.quant.forward import TensorProvider
from nybble.quant.packing import QuantizedTensor
from nybble.quant.quality import kl_divergence, logits_function
from nybble.quant.quantize import quantize
from nybble.quant.recipe import LinearFormat, Recipe
from nybble.quant.rtn import quantize_rtn

torch = pytest.importorskip("torch")

IDS = np.random.default_rng(0).integers(0, 512, (16, 64)).astype(np.int32)


@given(
    st.lists(
        st.lists(st.tuples(st.integers(1, 40), st.floats(0, 10)), min_size=3, max_size=3),
        min_size=1,
        max_size=5,
    ),
    st.integers(0, 150),
)
def test_the_best_of_all_choices(items: list[list[tuple[int, float]]], room: int) -> None:
    costs = np.array([[cost for cost, _ in item] for item in items])
    losses = np.array([[loss for _, loss in item] for item in items])
    rows = np.arange(len(items))
    choices = [np.array(c) for c in itertools.product(range(3), repeat=len(items))]
    affordable = [losses[rows, c].sum() for c in choices if costs[rows, c].sum() <= room]
    if not affordable:
        with pytest.raises(SettingError, match="budget"):
            budget.allocate(costs, losses, room)
        return
    found = np.array(budget.allocate(costs, losses, room))
    assert costs[rows, found].sum() <= room
    assert losses[rows, found].sum() == pytest.approx(min(affordable))


def test_bits_of_a_row() -> None:
    assert LinearFormat(4, 32, False).row_bits(576) == 576 * 4 + 18 * 20
    assert LinearFormat(8, 64, True).row_bits(100) == 800 + 2 * 16
    assert LinearFormat(4, -1, True).row_bits(100) == 400 + 16


class OneRounded:
    """A source with one tensor replaced."""

    def __init__(self, source: ModelSource, name: str, weight: "torch.Tensor") -> None:
        self.spec, self._source, self._name, self._weight = source.spec, source, name, weight

    def tensor(self, name: str) -> "QuantizedTensor | np.ndarray":
        return self._weight.numpy() if name == self._name else self._source.tensor(name)


def test_sensitivity_is_the_divergence_of_rounding_one_layer(make_tiny_model: Callable[..., Path]) -> None:
    source = open_source(make_tiny_model("llama"))
    options = (LinearFormat(4, 32, True), LinearFormat(8, 64, True))
    ids = np.repeat(IDS, 4, axis=0)  # drawn tokens differ, so more of the same windows measure better
    original, budget.WINDOWS = budget.WINDOWS, 64
    try:
        found = budget.sensitivities(source, Recipe(), ids, options)
    finally:
        budget.WINDOWS = original
    reference = logits_function(source)(IDS)
    for kind in ("self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"):
        name = f"model.layers.1.{kind}.weight"
        weight = torch.from_numpy(source.tensor(name).copy())
        quantized = quantize_rtn(weight, Recipe(method="rtn", group_size=32), name)
        rounded = torch.from_numpy(quantized.dequantize())
        provider: TensorProvider = OneRounded(source, name, rounded)
        expected = float(kl_divergence(reference, logits_function(provider)(IDS)).sum()) * 4
        assert found[name][0] == pytest.approx(expected, rel=0.5)
        assert found[name][1] < 0.02 * found[name][0]


@pytest.mark.parametrize(("bits", "used_bits"), [(5.5, {4, 8}), (3.9, {3, 4})])
def test_a_model_within_its_budget(
    make_tiny_model: Callable[..., Path], bits: float, used_bits: set[int]
) -> None:
    source = open_source(make_tiny_model("llama"))
    calibration = Calibration(IDS, "digest", "test")
    recipe = Recipe(samples=16, seq_len=64, average_bits=bits)
    model = quantize(source, recipe, calibration, threads=1)
    linears = [x for layer in range(2) for x in source.spec.linears(layer)]
    forms = [model.recipe.format_of(x.name) for x in linears]
    assert {form.bits for form in forms} == used_bits
    weights = sum(x.out_features * x.in_features for x in linears)
    used = sum(budget.stored_bits(x, form) for x, form in zip(linears, forms, strict=True)) / weights
    assert bits - 0.3 < used <= bits
    for linear, form in zip(linears, forms, strict=True):
        tensor = model.tensors[linear.name]
        assert isinstance(tensor, QuantizedTensor)
        assert (tensor.bits, tensor.zeros is None) == (max(4, form.bits), form.symmetric)
        zeros = 0 if tensor.zeros is None else tensor.zeros.size * form.bits
        stored = tensor.codes.size * form.bits + 8 * tensor.scales.nbytes + zeros
        assert stored == budget.stored_bits(linear, form)


class Unread(OneRounded):
    """A source of which no tensor may be read."""

    def tensor(self, name: str) -> "QuantizedTensor | np.ndarray":
        raise AssertionError(f"{name} was read")


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (Recipe(average_bits=3.1), r"bits are a budget, 3\.1; expected at least 3\.25"),
        (Recipe(average_bits=3.24, symmetric=False), r"bits are a budget, 3\.24; expected at least 3\.25"),
        (
            Recipe(average_bits=5, layer_formats=(("a", LinearFormat(8, 64, True)),)),
            "expected none with average_bits",
        ),
    ],
)
def test_a_budget_that_cannot_be_kept_is_refused_before_anything_is_read(
    make_tiny_model: Callable[..., Path], recipe: Recipe, message: str
) -> None:
    source = open_source(make_tiny_model("llama", intermediate_size=128))
    unread: Any = Unread(source, "", torch.empty(0))
    with pytest.raises(SettingError, match=message):
        quantize(unread, recipe, Calibration(IDS, "digest", "test"))


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_least_budget_is_enough(make_tiny_model: Callable[..., Path], symmetric: bool) -> None:
    source = open_source(make_tiny_model("llama", intermediate_size=128))
    # Groups of 64 in whole rows; without zero points, also where the recipe has them.
    recipe = Recipe(samples=16, seq_len=64, average_bits=4.25, symmetric=symmetric)
    model = quantize(source, recipe, Calibration(IDS, "digest", "test"), threads=1)
    assert model.recipe.format == LinearFormat(4, 64, True)
    assert model.recipe.layer_formats == ()


def test_the_cheapest_choice_fits_whatever_the_tables_steps() -> None:
    """Costs that share no divisor, of more different sums than the table has columns."""
    rng = np.random.default_rng(0)
    costs = rng.integers(10**8, 10**9, (300, 3)) * 2 + 1
    losses = np.sort(rng.random((300, 3)))[:, ::-1]
    least = int(costs.min(axis=1).sum())
    rows = np.arange(300)
    assert costs[rows, budget.allocate(costs, losses, least)].sum() == least
    for room in (least + 1, least + 10**9, least + 10**11, 2**60):
        found = budget.allocate(costs, losses, room)
        assert costs[rows, found].sum() <= room
    assert losses[rows, found].sum() == losses.min(axis=1).sum()
    with pytest.raises(SettingError, match=f"expected at least {least}"):
        budget.allocate(costs, losses, least - 1)
