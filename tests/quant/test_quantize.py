"""A whole small model through `quantize`."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from nybble.errors import CalibrationError, QuantizationError, SettingError
from nybble.models import open_source
from nybble.models.source import ModelSource
from nybble.quant import layer, target
from nybble.quant.calibration import Calibration
from nybble.quant.model import QuantizedModel
from nybble.quant.packing import QuantizedTensor, quantize_head
from nybble.quant.quality import DequantizedModel, kl_divergence, logits_function
from nybble.quant.quantize import quantize
from nybble.quant.recipe import LinearFormat, Recipe

torch = pytest.importorskip("torch")

RECIPE = Recipe(group_size=64, samples=16, seq_len=64)


def calibration(seed: int = 0) -> Calibration:
    ids = np.random.default_rng(seed).integers(0, 512, (16, 64)).astype(np.int32)
    return Calibration(ids, "digest", "test")


@pytest.fixture(scope="module")
def source(make_tiny_model: Callable[..., Path]) -> ModelSource:
    return open_source(make_tiny_model("qwen3", attention_bias=True, tie_word_embeddings=False))


@pytest.fixture(scope="module")
def gptq_model(source: ModelSource) -> QuantizedModel:
    return quantize(source, RECIPE, calibration(), threads=1)


def assert_same_bits(one: QuantizedModel, other: QuantizedModel) -> None:
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        twin = other.tensors[name]
        if isinstance(tensor, QuantizedTensor):
            assert isinstance(twin, QuantizedTensor)
            assert tensor.packed.tobytes() == twin.packed.tobytes()
            assert tensor.scales.tobytes() == twin.scales.tobytes()
            assert tensor.zero_points.tobytes() == twin.zero_points.tobytes()
        else:
            assert not isinstance(twin, QuantizedTensor)
            assert tensor.tobytes() == twin.tobytes()
    assert one.layer_errors == other.layer_errors


def test_every_tensor_is_there_in_its_form(source: ModelSource, gptq_model: QuantizedModel) -> None:
    spec = source.spec
    assert list(gptq_model.tensors) == list(spec.tensors())
    linears = {linear.name for layer in range(spec.num_layers) for linear in spec.linears(layer)}
    for name, shape in spec.tensors().items():
        tensor = gptq_model.tensors[name]
        if name in linears:
            assert isinstance(tensor, QuantizedTensor)
            assert (tensor.out_features, tensor.in_features) == shape
            assert (tensor.bits, tensor.group_size) == (4, 64)
        else:
            assert not isinstance(tensor, QuantizedTensor)
            assert np.array_equal(tensor, source.tensor(name).astype(np.float16))
    assert gptq_model.layer_errors.keys() == linears
    assert all(0 < error < 0.1 for error in gptq_model.layer_errors.values())
    assert gptq_model.calibration_digest == "digest"
    assert gptq_model.source_digest == source.digest


def test_twice_is_the_same_to_the_last_bit(source: ModelSource, gptq_model: QuantizedModel) -> None:
    assert_same_bits(gptq_model, quantize(source, RECIPE, calibration(), threads=1))
    two = quantize(source, RECIPE, calibration(), threads=2)
    assert_same_bits(two, quantize(source, RECIPE, calibration(), threads=2))


def test_other_calibration_gives_other_weights(source: ModelSource, gptq_model: QuantizedModel) -> None:
    other = quantize(source, RECIPE, calibration(1), threads=1)
    name = "model.layers.1.mlp.down_proj.weight"
    one, two = gptq_model.tensors[name], other.tensors[name]
    assert isinstance(one, QuantizedTensor)
    assert isinstance(two, QuantizedTensor)
    assert not np.array_equal(one.packed, two.packed)


def test_model_is_closer_than_with_rounding(source: ModelSource, gptq_model: QuantizedModel) -> None:
    ids = np.random.default_rng(7).integers(0, 512, (4, 64))
    reference = logits_function(source)(ids)
    plain = quantize(source, replace(RECIPE, method="rtn", clip_search=False))
    assert plain.calibration_digest is None
    divergence = {
        name: kl_divergence(reference, logits_function(DequantizedModel(model))(ids)).mean()
        for name, model in {"gptq": gptq_model, "rtn": plain}.items()
    }
    assert divergence["gptq"] < 0.85 * divergence["rtn"]
    eight = quantize(source, replace(RECIPE, bits=8), calibration())
    found = kl_divergence(reference, logits_function(DequantizedModel(eight))(ids)).mean()
    assert found < 0.01 * divergence["gptq"]


def test_calibration_in_bfloat16_is_as_good(source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = np.random.default_rng(7).integers(0, 512, (16, 64))
    reference = logits_function(source)(ids)
    recipe = replace(RECIPE, weigh_tokens=True, sweeps=2)
    found = {}
    for kind in (torch.float32, torch.bfloat16):
        monkeypatch.setattr(layer, "fast_dtype", lambda kind=kind: kind)
        model = quantize(source, recipe, calibration(), threads=1)
        found[kind] = kl_divergence(reference, logits_function(DequantizedModel(model))(ids)).mean()
    assert found[torch.bfloat16] == pytest.approx(found[torch.float32], rel=0.05)


@pytest.mark.parametrize(
    ("family", "tied"),
    [("llama", True), ("llama", False), ("granite", False), ("olmo2", False), ("gemma2", True)],
)
def test_dequantized_model_is_what_transformers_computes(
    make_tiny_model: Callable[..., Path], family: str, tied: bool
) -> None:
    """Our logits of a quantized model against transformers running its dequantized weights."""
    from transformers import AutoModelForCausalLM

    folder = make_tiny_model(family, tie_word_embeddings=tied)
    model = quantize(open_source(folder), replace(RECIPE, act_order="dynamic"), calibration())
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    state = {}
    for name, tensor in model.tensors.items():
        if isinstance(tensor, QuantizedTensor):
            state[name] = torch.from_numpy(tensor.dequantize())
        elif name in ("model.embed_tokens.weight", "lm_head.weight"):
            state[name] = torch.from_numpy(quantize_head(tensor).dequantize())
        else:
            state[name] = torch.from_numpy(tensor.astype(np.float32))
    reference.load_state_dict(state, strict=not tied)
    reference.tie_weights()
    ids = np.random.default_rng(3).integers(0, 512, (2, 50))
    with torch.no_grad():
        expected = reference(torch.from_numpy(ids)).logits
    assert (logits_function(DequantizedModel(model))(ids) - expected).abs().max() < 1e-4


def test_progress_counts_layers(source: ModelSource) -> None:
    seen: list[tuple[str, int, int]] = []
    quantize(source, Recipe(method="rtn"), progress=lambda *step: seen.append(step))
    assert seen == [("quantize", 0, 2), ("quantize", 1, 2), ("quantize", 2, 2)]


class Changed:
    """A source with one element of one tensor replaced."""

    def __init__(self, source: ModelSource, name: str, value: float) -> None:
        self._source, self._name, self._value = source, name, value

    def __getattr__(self, name: str) -> object:
        return getattr(self._source, name)

    def tensor(self, name: str) -> NDArray[np.float32]:
        tensor = self._source.tensor(name).copy()
        if name == self._name:
            tensor.flat[5] = self._value
        return tensor


@pytest.mark.parametrize("method", ["gptq", "rtn"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model.embed_tokens.weight", 7e4),
        ("lm_head.weight", np.inf),
        ("model.norm.weight", -1e5),
        ("model.layers.1.input_layernorm.weight", np.nan),
        ("model.layers.0.self_attn.k_proj.bias", 65520.0),
        ("model.layers.1.mlp.up_proj.weight", np.nan),
    ],
)
def test_numbers_that_cannot_be_stored_name_the_tensor(
    source: ModelSource, method: str, name: str, value: float
) -> None:
    with pytest.raises(QuantizationError) as caught:
        quantize(Changed(source, name, value), replace(RECIPE, method=method), calibration())  # type: ignore[arg-type]
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_settings_that_contradict(source: ModelSource) -> None:
    with pytest.raises(CalibrationError, match="needs a calibration text"):
        quantize(source, RECIPE)
    with pytest.raises(SettingError, match="threads is 0"):
        quantize(source, RECIPE, calibration(), threads=0)
    beyond = Calibration(np.full((16, 64), 512, np.int32), "", "")
    with pytest.raises(CalibrationError, match="token 512 is not in the model's vocabulary of 512"):
        quantize(source, RECIPE, beyond)


def test_formats_of_layers_that_the_model_lacks(source: ModelSource) -> None:
    eight = LinearFormat(8, 64, True)
    for name in ("model.layers.0.mlp.down_proj", "model.layers.9.mlp.down_proj.weight", "lm_head.weight"):
        recipe = replace(RECIPE, method="rtn", layer_formats=((name, eight),))
        with pytest.raises(SettingError, match=f"'{name}' is no linear layer of the model; expected model."):
            quantize(source, recipe)


def test_parts_of_one_tensor_have_one_format(make_tiny_model: Callable[..., Path]) -> None:
    fused = open_source(make_tiny_model("phi3"))
    names = [f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv"]
    recipe = replace(
        RECIPE, method="rtn", layer_formats=tuple((name, LinearFormat(8, 64, True)) for name in names)
    )
    model = quantize(fused, recipe)
    assert [model.tensors[name].bits for name in names] == [8, 8, 8]
    with pytest.raises(SettingError, match=r"differ; .* one tensor of a checkpoint, .*\.qkv_proj\.weight"):
        quantize(fused, replace(recipe, layer_formats=recipe.layer_formats[:2]))


def test_threads_are_put_back(source: ModelSource) -> None:
    before = torch.get_num_threads()
    quantize(source, Recipe(method="rtn"), threads=before + 1)
    assert torch.get_num_threads() == before


def test_a_short_text_corrects_less_and_does_less_harm(
    source: ModelSource, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ids = np.random.default_rng(9).integers(0, 512, (16, 64))
    expected = logits_function(source)(ids)

    def divergence(correction: float, tokens: int) -> float:
        caplog.clear()
        recipe = replace(RECIPE, correction=correction, weigh_tokens=True)
        text = Calibration(calibration(1).token_ids.reshape(-1, 64)[: tokens // 64], "digest", "test")
        model = quantize(source, recipe, text, threads=1)
        found = logits_function(DequantizedModel(model))(ids)
        return float(kl_divergence(expected, found).mean())

    none = divergence(0.0, 256)
    assert caplog.messages == []
    some = divergence(1.0, 256)
    assert caplog.messages == [
        "the calibration text has 256 tokens, and layers have up to 96 inputs: correction, 1, is lessened "
        "there; 960 tokens are enough for all of it"
    ]
    divergence(1.0, 1024)
    assert caplog.messages == []
    monkeypatch.setattr(target, "TOKENS_PER_INPUT", 1)
    assert some < 1.3 * none < divergence(1.0, 256)


@pytest.mark.parametrize("correction", [0.0, 0.5])
def test_inputs_that_are_not_finite_name_the_layers(source: ModelSource, correction: float) -> None:
    recipe = replace(RECIPE, correction=correction)
    formats = {linear.name: recipe.format for linear in source.spec.linears(0)}
    hidden = torch.full((2, 8, source.spec.hidden_size), torch.inf)
    with pytest.raises(QuantizationError, match=r"q_proj\.weight and .*v_proj\.weight: its input on"):
        layer.quantize_layer(source, 0, recipe, hidden, hidden.clone(), formats)
