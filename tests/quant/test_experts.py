"""Mixtures of experts: who computes for a token, and which tokens an expert is calibrated on."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nybble.errors import SettingError
from nybble.models import open_source
from nybble.models.source import ModelSource
from nybble.models.spec import LinearSpec, MixtureSpec, ModelSpec
from nybble.quant.calibration import Calibration
from nybble.quant.experts import mixture_stages, routing
from nybble.quant.forward import to_torch
from nybble.quant.packing import QuantizedTensor
from nybble.quant.quality import DequantizedModel, kl_divergence, logits_function
from nybble.quant.quantize import quantize
from nybble.quant.recipe import Recipe

torch = pytest.importorskip("torch")

RECIPE = Recipe(group_size=32, samples=16, seq_len=64)
HIDDEN = 64
EXPERTS: dict[str, Any] = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 80, "mlp_only_layers": [0],
}  # fmt: skip


@pytest.fixture(scope="module")
def source(make_tiny_model: Callable[..., Path]) -> ModelSource:
    """Eight experts, of which an expert is shared; an MLP in the first layer."""
    return open_source(make_tiny_model("qwen2_moe", **EXPERTS))


def calibration(samples: int = 16) -> Calibration:
    ids = np.random.default_rng(0).integers(0, 512, (samples, 64)).astype(np.int32)
    return Calibration(ids, "digest", "test")


@pytest.mark.parametrize("normalized", [False, True])
def test_the_highest_logits_choose_and_of_equal_ones_the_lowest_expert(normalized: bool) -> None:
    mixture = MixtureSpec((0,), 6, 3, 8, normalized)
    logits = np.random.default_rng(0).integers(-2, 3, (200, 6)).astype(np.float32)
    chosen, shares = (x.numpy() for x in routing(mixture, torch.from_numpy(logits)))
    for token in range(200):
        order = sorted(range(6), key=lambda expert: (-logits[token, expert], expert))[:3]
        assert set(np.flatnonzero(chosen[token])) == set(order)
        weights = np.exp(logits[token].astype(np.float64))
        weights /= weights[order].sum() if normalized else weights.sum()
        assert np.allclose(shares[token], np.where(chosen[token], weights, 0), atol=1e-6)


def mixture_inputs(source: ModelSource, tokens: int) -> tuple[dict[str, Any], Any]:
    spec = source.spec
    weights = {name: to_torch(source.tensor(name)) for name in spec.layer_tensors(1)}
    x = np.random.default_rng(1).normal(size=(tokens, HIDDEN)).astype(np.float32)
    return weights, torch.from_numpy(x)


def run_mixture(
    spec: ModelSpec, weights: dict[str, Any], x: Any, before: Callable[..., None] | None = None
) -> tuple[Any, int]:
    """What layer 1's mixture gives, and how many experts were starved; `before` sees its stages."""
    stages, starved = mixture_stages(spec, 1, weights, x, calibrate=before is not None), 0
    while True:
        try:
            stage = next(stages)
        except StopIteration as end:
            return end.value, starved
        starved += stage.starved
        if before is not None:
            before(stage.linears, stage.inputs)


@pytest.mark.parametrize("tokens", [2000, 100])
def test_an_expert_sees_the_tokens_that_are_routed_to_it_and_others_only_where_they_are_few(
    source: ModelSource, tokens: int, caplog: pytest.LogCaptureFixture
) -> None:
    spec = source.spec
    weights, x = mixture_inputs(source, tokens)
    seen: dict[str, Any] = {}

    def before(linears: tuple[LinearSpec, ...], inputs: Any) -> None:
        seen[linears[0].name] = inputs

    with caplog.at_level(logging.WARNING, "nybble.quant"):
        given, starved = run_mixture(spec, weights, x, before)
    plain, none = run_mixture(spec, weights, x)
    assert none == 0
    assert torch.allclose(given, plain, atol=1e-6)
    logits = x.numpy() @ weights["model.layers.1.mlp.gate.weight"].numpy().T
    routed = np.argsort(-logits, axis=1, kind="stable")[:, :2]
    few = 0
    for expert in range(8):
        own = np.flatnonzero((routed == expert).any(axis=1))
        few += len(own) < HIDDEN
        found = seen[f"model.layers.1.mlp.experts.{expert}.gate_proj.weight"].numpy()
        assert len(found) == max(len(own), HIDDEN)
        assert np.array_equal(found[: len(own)], x.numpy()[own])
        others = {row.tobytes() for row in found[len(own) :]}
        assert len(others) == len(found) - len(own)
        assert others <= {row.tobytes() for row in np.delete(x.numpy(), own, axis=0)}
        assert len(seen[f"model.layers.1.mlp.experts.{expert}.down_proj.weight"]) == len(found)
    assert starved == few
    assert (few > 0) == (tokens == 100)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["layer 1"] * (few > 0)
    assert len(seen["model.layers.1.mlp.shared_expert.gate_proj.weight"]) == tokens


def test_an_expert_that_no_token_reaches_is_calibrated_on_the_layers_tokens(source: ModelSource) -> None:
    weights, x = mixture_inputs(source, 500)
    router = weights["model.layers.1.mlp.gate.weight"]
    router[5] = router[4]  # with one expert a token, the lower of equal ones gets them all
    assert source.spec.mixture is not None
    spec = replace(source.spec, mixture=replace(source.spec.mixture, experts_per_token=1))
    seen: dict[str, int] = {}
    run_mixture(spec, weights, x, lambda linears, inputs: seen.update({linears[0].name: len(inputs)}))
    assert seen["model.layers.1.mlp.experts.5.gate_proj.weight"] == HIDDEN


@pytest.mark.parametrize("method", ["gptq", "rtn"])
def test_a_whole_model_has_quantized_experts_and_a_router_of_floats(source: ModelSource, method: Any) -> None:
    spec = source.spec
    model = quantize(source, replace(RECIPE, method=method), calibration(32), threads=1)
    linears = {linear.name for layer in range(spec.num_layers) for linear in spec.linears(layer)}
    assert len(linears) == 2 * 4 + 3 + 3 * 9
    assert model.layer_errors.keys() == linears
    for name in spec.tensors():
        assert isinstance(model.tensors[name], QuantizedTensor) == (name in linears)
    router = model.tensors["model.layers.1.mlp.gate.weight"]
    assert isinstance(router, np.ndarray)
    assert router.dtype == np.float16
    assert model.starved_experts == {}
    ids = np.random.default_rng(3).integers(0, 512, (4, 64))
    expected = logits_function(source)(ids)
    found = logits_function(DequantizedModel(model))(ids)
    assert kl_divergence(expected, found).mean() < 0.1


def test_starved_experts_are_counted(source: ModelSource) -> None:
    model = quantize(source, RECIPE, calibration(2), threads=1)
    assert model.starved_experts.keys() == {"1"}
    assert 0 < model.starved_experts["1"] <= 8


@pytest.mark.parametrize("settings", [{"tune_epochs": 1}, {"average_bits": 4.5}])
def test_what_needs_a_gradient_is_refused_before_the_work(
    source: ModelSource, settings: dict[str, Any]
) -> None:
    with pytest.raises(SettingError, match="mixture of experts"):
        quantize(source, replace(RECIPE, **settings), calibration(2))


def test_corrections_leave_mixtures_as_they_are(make_tiny_model: Callable[..., Path]) -> None:
    """A layer with a mixture, the first one here, has the same bits with them and without; the next not."""
    source = open_source(make_tiny_model("qwen2_moe", **{**EXPERTS, "mlp_only_layers": [1]}))
    corrected = replace(RECIPE, correction=1.0, weigh_tokens=True)
    one, other = (quantize(source, recipe, calibration(8), threads=1) for recipe in (RECIPE, corrected))
    for layer, same in ((0, True), (1, False)):
        for linear in source.spec.linears(layer):
            tensor, twin = one.tensors[linear.name], other.tensors[linear.name]
            assert isinstance(tensor, QuantizedTensor)
            assert isinstance(twin, QuantizedTensor)
            assert np.array_equal(tensor.packed, twin.packed) == same, linear.name


def test_calibration_on_its_own_tokens_beats_rounding_on_them(source: ModelSource) -> None:
    by = {
        method: quantize(source, replace(RECIPE, method=method), calibration(), threads=1)
        for method in ("gptq", "rtn")
    }
    ids = calibration().token_ids
    expected = logits_function(source)(ids)
    errors = {
        method: kl_divergence(expected, logits_function(DequantizedModel(model))(ids)).mean()
        for method, model in by.items()
    }
    assert errors["gptq"] < errors["rtn"]
