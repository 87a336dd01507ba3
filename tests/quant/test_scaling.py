"""Scales for input channels, folded in: the same function, and less lost by rounding."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoders import FAMILY_CASES
from numpy.typing import NDArray

from nybble.errors import CalibrationError, QuantizationError, SettingError
from nybble.models import open_source
from nybble.models.source import ModelSource
from nybble.models.spec import ModelSpec
from nybble.quant.calibration import Calibration
from nybble.quant.quality import DequantizedModel, kl_divergence, logits_function
from nybble.quant.quantize import quantize
from nybble.quant.recipe import LinearFormat, Recipe
from nybble.quant.scaling import folds, scaled

torch = pytest.importorskip("torch")

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "one head of keys": ("llama", {"head_dim": 24, "num_attention_heads": 4, "num_key_value_heads": 1}),
    "every head its own": ("llama", {"num_attention_heads": 4, "num_key_value_heads": 4}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    **FAMILY_CASES,
}
RECIPE = Recipe(group_size=32, symmetric=False, samples=16, seq_len=64, scaling=True)
ROUNDING = replace(RECIPE, method="rtn")


def tokens(seed: int = 0, count: int = 16) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, 512, (count, 64)).astype(np.int32)


class Uneven:
    """A source whose channels differ: some count for a hundred times as much, as those of trained models
    do. Norms and rows are multiplied, and nothing makes up for it."""

    def __init__(self, source: ModelSource) -> None:
        self._source = source
        self.spec = source.spec

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def tensor(self, name: str) -> NDArray[np.float32]:
        tensor, offset = self._source.tensor(name), self.spec.norm_offset
        random = np.random.default_rng(len(name))
        factors = np.exp(random.normal(size=len(tensor)).clip(-2, 2)).astype(np.float32)
        if name.endswith(("input_layernorm.weight", "pre_feedforward_layernorm.weight")):
            return (tensor + offset) * factors - offset
        return (tensor.T * factors).T if name.endswith(("up_proj.weight", "v_proj.weight")) else tensor


@pytest.fixture(scope="module")
def source(make_tiny_model: Callable[..., Path]) -> Uneven:
    return Uneven(open_source(make_tiny_model("llama", tie_word_embeddings=False)))


@pytest.mark.parametrize("which", FAMILIES)
@pytest.mark.parametrize("recipe", [RECIPE, ROUNDING], ids=["gptq", "rtn"])
def test_a_scaled_model_is_the_same_function(
    make_tiny_model: Callable[..., Path], which: str, recipe: Recipe
) -> None:
    family, overrides = FAMILIES[which]
    plain = Uneven(open_source(make_tiny_model(family, **overrides)))
    with torch.no_grad():
        model = scaled(plain, recipe, tokens())
    spec, ids = plain.spec, tokens(1, 3)
    expected = logits_function(plain)(ids)
    assert (logits_function(model)(ids) - expected).abs().max() < 1e-4 * max(1, float(expected.abs().max()))
    for layer in range(spec.num_layers):
        for fold in folds(spec, layer):
            # Somewhere in the layer's columns; an expert that no token reached is left as it is.
            assert model.tensor(fold.before).shape == plain.tensor(fold.before).shape
    changed = {name for name in spec.tensors() if not np.array_equal(model.tensor(name), plain.tensor(name))}
    ends = {spec.embedding_name, spec.head_name, spec.final_norm_name}
    assert changed
    assert not changed & ends
    assert any(name.endswith("down_proj.weight") or name.endswith("w2.weight") for name in changed)
    before = [name for layer in range(spec.num_layers) for name in spec.layer_norms(layer)[::2] if name]
    assert bool(changed & set(before)) == bool(before)


def test_where_scales_go(make_tiny_model: Callable[..., Path]) -> None:
    def of(family: str, **overrides: Any) -> tuple[ModelSpec, list[str]]:
        spec = open_source(make_tiny_model(family, **overrides)).spec
        return spec, [fold.before.removeprefix("model.layers.1.") for fold in folds(spec, 1)]

    around = ["self_attn.v_proj.weight", "mlp.up_proj.weight"]
    before = ["input_layernorm.weight", around[0], "post_attention_layernorm.weight", around[1]]
    assert of("llama")[1] == before
    assert of("olmo2")[1] == around  # whose norms stand behind
    assert of("gemma2")[1] == [*before[:2], "pre_feedforward_layernorm.weight", around[1]]
    spec, found = of("mixtral", num_local_experts=4)
    experts = [f"block_sparse_moe.experts.{expert}." for expert in range(4)]
    assert found == [*before[:3], *(f"{expert}w3.weight" for expert in experts)]
    mixture = folds(spec, 1)[2]
    names = {f"{expert}{name}.weight" for expert in experts for name in ("w1", "w3")}
    assert {x.removeprefix("model.layers.1.") for x in mixture.readers} == {
        "block_sparse_moe.gate.weight", *names,
    }  # fmt: skip


def test_query_heads_of_one_head_of_keys_and_values_share_their_scales(source: Uneven) -> None:
    spec = source.spec
    fold = folds(spec, 0)[1]
    scales = np.arange(spec.kv_size)
    found = fold.spread(scales).reshape(spec.num_heads, spec.head_dim)
    for head in range(spec.num_heads):
        own = head // (spec.num_heads // spec.num_kv_heads)
        assert np.array_equal(found[head], scales.reshape(-1, spec.head_dim)[own])


@pytest.mark.parametrize("recipe", [RECIPE, ROUNDING], ids=["gptq", "rtn"])
@pytest.mark.parametrize("group_size", [32, -1])
def test_less_is_lost_where_channels_differ(source: Uneven, recipe: Recipe, group_size: int) -> None:
    ids = tokens(7, 8)
    expected = logits_function(source)(ids)
    text = Calibration(tokens(), "digest", "test")
    found = {}
    for scaling in (False, True):
        model = quantize(source, replace(recipe, scaling=scaling, group_size=group_size), text, threads=1)  # type: ignore[arg-type]
        found[scaling] = float(kl_divergence(expected, logits_function(DequantizedModel(model))(ids)).mean())
        uses_text = scaling or recipe.method == "gptq"
        assert model.calibration_digest == ("digest" if uses_text else None)
    assert found[True] < 0.9 * found[False]


def test_layers_have_scales_for_their_own_formats(source: Uneven) -> None:
    eight = LinearFormat(8, 32, False)
    name = "model.layers.0.mlp.down_proj.weight"
    one, other = (
        scaled(source, recipe, tokens())  # type: ignore[arg-type]
        for recipe in (RECIPE, replace(RECIPE, layer_formats=((name, eight),)))
    )
    same = "model.layers.1.mlp.down_proj.weight"
    assert np.array_equal(one.tensor(same), other.tensor(same))
    assert not np.array_equal(one.tensor(name), other.tensor(name))


def test_a_budget_is_spent_on_the_scaled_model(source: Uneven) -> None:
    recipe = replace(RECIPE, average_bits=5.0)
    model = quantize(source, recipe, Calibration(tokens(), "digest", "test"), threads=1)  # type: ignore[arg-type]
    assert model.recipe.scaling
    assert len(model.recipe.all_formats) > 1
    ids = tokens(7, 4)
    found = logits_function(DequantizedModel(model))(ids)
    assert kl_divergence(logits_function(source)(ids), found).mean() < 0.1


def test_a_layer_is_read_after_the_one_before(source: Uneven) -> None:
    read: list[str] = []

    class Recorded(Uneven):
        def tensor(self, name: str) -> NDArray[np.float32]:
            read.append(name)
            return super().tensor(name)

    scaled(Recorded(source), RECIPE, tokens())  # type: ignore[arg-type]
    layers = [int(name.split(".")[2]) for name in read if name.startswith("model.layers.")]
    assert layers == sorted(layers)
    assert len(read) == len(set(read))


def test_an_expert_that_no_token_reaches_stays(make_tiny_model: Callable[..., Path]) -> None:
    plain = open_source(make_tiny_model("mixtral", num_local_experts=16, num_experts_per_tok=1))
    few = tokens(count=1)[:, :4]
    with torch.no_grad():
        model = scaled(plain, ROUNDING, few)
    ups = [x.name for layer in range(2) for x in plain.spec.linears(layer) if x.name.endswith("w3.weight")]
    # Their rows are what they were but for the columns' scales, which are those of the norm.
    ratios = {name: model.tensor(name) / plain.tensor(name) for name in ups}
    even = [name for name, ratio in ratios.items() if np.allclose(ratio, ratio[:1], rtol=1e-5)]
    assert 16 <= len(even) < len(ups)
    ids = tokens(1, 2)
    assert (logits_function(model)(ids) - logits_function(plain)(ids)).abs().max() < 1e-4


def test_what_is_refused(source: Uneven) -> None:
    with pytest.raises(CalibrationError, match="scaling needs a calibration text"):
        quantize(source, ROUNDING)  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="scaling is True; expected False for method int8"):
        Recipe(method="int8", bits=8, group_size=-1, clip_search=False, scaling=True)

    class Broken(Uneven):
        def tensor(self, name: str) -> NDArray[np.float32]:
            tensor = super().tensor(name)
            return tensor * np.float32(1e30) if name == "model.layers.1.mlp.up_proj.weight" else tensor

    for recipe in (RECIPE, ROUNDING):
        with pytest.raises(QuantizationError, match=r"mlp\.down_proj\.weight: its input on the cal"):
            scaled(Broken(source), recipe, tokens())  # type: ignore[arg-type]
        beyond = Calibration(np.full((4, 64), 512, np.int32), "", "")
        with pytest.raises(CalibrationError, match="token 512 is not in the model's vocabulary of 512"):
            quantize(source, recipe, beyond)  # type: ignore[arg-type]


def test_another_method_has_no_scales_unless_asked_for() -> None:
    assert not RECIPE.changed(method="rtn").scaling
    assert RECIPE.changed(method="rtn", scaling=True).scaling
    assert RECIPE.changed(method="gptq", bits=8).scaling
    assert not RECIPE.changed(method="nf4").scaling
