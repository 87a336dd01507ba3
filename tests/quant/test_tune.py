"""Tuning of scales and norms on a small model: what it promises to change and what not."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nybble.models import open_source
from nybble.models.source import ModelSource
from nybble.quant.calibration import Calibration
from nybble.quant.model import QuantizedModel
from nybble.quant.packing import QuantizedTensor
from nybble.quant.quality import DequantizedModel, kl_divergence, logits_function
from nybble.quant.quantize import quantize
from nybble.quant.recipe import Recipe
from nybble.quant.tune import CodedWeight

torch = pytest.importorskip("torch")

PLAIN = Recipe(group_size=32, symmetric=False, act_order="dynamic", samples=16, seq_len=64, correction=1.0)
IDS = np.random.default_rng(0).integers(0, 512, (16, 64)).astype(np.int32)
CALIBRATION = Calibration(IDS, "digest", "test")


@pytest.fixture(scope="module")
def source(make_tiny_model: Callable[..., Path]) -> ModelSource:
    return open_source(make_tiny_model("qwen3"))


@pytest.fixture(scope="module")
def plain(source: ModelSource) -> QuantizedModel:
    return quantize(source, PLAIN, CALIBRATION, threads=1)


@pytest.fixture(scope="module")
def tuned(source: ModelSource) -> QuantizedModel:
    return quantize(source, replace(PLAIN, tune_epochs=8, tune_rate=0.005), CALIBRATION, threads=1)


def divergence(source: ModelSource, model: QuantizedModel) -> float:
    reference = logits_function(source)(IDS)
    return float(kl_divergence(reference, logits_function(DequantizedModel(model))(IDS)).mean())


def test_predictions_come_closer(source: ModelSource, plain: QuantizedModel, tuned: QuantizedModel) -> None:
    assert divergence(source, tuned) < 0.9 * divergence(source, plain)


def test_only_scales_and_norms_change(plain: QuantizedModel, tuned: QuantizedModel) -> None:
    for name, before in plain.tensors.items():
        after = tuned.tensors[name]
        if isinstance(before, QuantizedTensor):
            assert isinstance(after, QuantizedTensor)
            assert np.array_equal(before.packed, after.packed)
            assert np.array_equal(before.zero_points, after.zero_points)
            assert after.scales.dtype == np.float16
            assert not np.array_equal(before.scales, after.scales)
            assert np.abs(after.scales / before.scales.astype(np.float32) - 1).max() < 0.3
        elif name.endswith("norm.weight"):
            assert after.dtype == np.float16
            assert not np.array_equal(before, after)
        else:
            assert np.array_equal(before, after)


def test_twice_is_the_same_to_the_last_bit(source: ModelSource, tuned: QuantizedModel) -> None:
    again = quantize(source, tuned.recipe, CALIBRATION, threads=1)
    for name, tensor in tuned.tensors.items():
        twin = again.tensors[name]
        if isinstance(tensor, QuantizedTensor):
            assert isinstance(twin, QuantizedTensor)
            assert np.array_equal(tensor.scales, twin.scales)
        else:
            assert np.array_equal(tensor, twin)


def test_coded_weights_are_the_dequantized_ones(plain: QuantizedModel) -> None:
    """With factors of 1, also where columns are permuted and the last group is short."""
    for tensor in plain.tensors.values():
        if isinstance(tensor, QuantizedTensor):
            found = CodedWeight(tensor).weight(torch.ones(tensor.scales.shape))
            assert np.array_equal(found.numpy(), tensor.dequantize())
    assert any(isinstance(t, QuantizedTensor) and t.permutation is not None for t in plain.tensors.values())
