"""RoPE frequencies and attention factors, against transformers' own."""

import copy
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from nybble.errors import ModelFormatError
from nybble.models import spec_from_config

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 256,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}

# In transformers 5's form: everything inside `rope_parameters`.
PARAMETERS: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "default", "rope_theta": 1000000},
    {"rope_type": "linear", "factor": 4, "rope_theta": 500000.0},
    {"rope_type": "linear", "factor": 2.5},
    {**LLAMA3, "rope_theta": 500000.0},
    {**LLAMA3, "rope_theta": 10000.0, "factor": 32.0, "high_freq_factor": 2.5},
    {**YARN, "rope_theta": 10000.0},
    {**YARN, "rope_theta": 1000000.0, "factor": 40.0, "truncate": False},
    {**YARN, "rope_theta": 10000.0, "beta_fast": 16, "beta_slow": 2.0},
    {**YARN, "rope_theta": 10000.0, "beta_fast": 0, "beta_slow": None},
    {**YARN, "rope_theta": 10000.0, "attention_factor": 1.25},
    {**YARN, "rope_theta": 10000.0, "mscale": 0.707, "mscale_all_dim": 1.0},
    {**YARN, "rope_theta": 10000.0, "mscale": 0.707},
    {**YARN, "rope_theta": 10000.0, "mscale": 1.0, "mscale_all_dim": 0.0},
    {**YARN, "rope_theta": 10000.0, "factor": None},
    # Correction ranges that reach past the last dimension, or before the first.
    {**YARN, "rope_theta": 10.0},
    {**YARN, "rope_theta": 10000.0, "original_max_position_embeddings": 16},
    {**YARN, "rope_theta": 10000.0, "original_max_position_embeddings": 4},
    {"rope_type": "yarn", "factor": 0.5, "rope_theta": 10000.0},
]


def theirs(family: str, settings: dict[str, Any]) -> tuple[Any, float]:
    """`inv_freq` and the attention factor of transformers' rotary module for a family."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings))
    rotary = model.model.rotary_emb
    return rotary.inv_freq.numpy(), rotary.attention_scaling


def check(family: str, settings: dict[str, Any]) -> None:
    # transformers changes the dictionaries it is given.
    copied = {key: dict(value) if isinstance(value, dict) else value for key, value in settings.items()}
    rope = spec_from_config({"model_type": family, **settings}, "config.json").rope
    frequencies, factor = theirs(family, copied)
    # A float32 power may differ in its last bits from torch's.
    np.testing.assert_allclose(rope.inv_freq(), frequencies, rtol=1e-6)
    assert rope.inv_freq().dtype == np.float32
    assert rope.attention_factor == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("parameters", PARAMETERS, ids=str)
def test_rope_parameters(parameters: dict[str, Any]) -> None:
    check("llama", {**SIZES, "rope_parameters": parameters})


@pytest.mark.parametrize("parameters", PARAMETERS[2:8], ids=str)
@pytest.mark.parametrize("type_key", ["rope_type", "type"])
def test_the_older_form_means_the_same(parameters: dict[str, Any], type_key: str) -> None:
    inner = {key: value for key, value in parameters.items() if key not in ("rope_type", "rope_theta")}
    inner[type_key] = parameters["rope_type"]
    outer = {"rope_theta": parameters["rope_theta"]} if "rope_theta" in parameters else {}
    check("llama", {**SIZES, "rope_scaling": inner, **outer})


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 50000.0},
        {"rope_theta": 50000.0, "rope_scaling": None},
        {"rope_theta": 50000.0, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        {"rope_theta": 50000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}},
        {
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0},
        },
        {"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 512},
        {"rope_scaling": YARN, "original_max_position_embeddings": 512},
        {"head_dim": 32},
        {},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_which_of_two_places_wins(family: str, changes: dict[str, Any]) -> None:
    check(family, {**SIZES, **changes})


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
        {**LLAMA3, "rope_theta": 500000.0},
        {**YARN, "rope_theta": 10000.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("partial", [0.25, 0.5, 0.75])
def test_a_partial_rotation_scales_as_transformers_functions_do(
    parameters: dict[str, Any], partial: float
) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {**parameters, "partial_rotary_factor": partial}
    frequencies, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](
        LlamaConfig(**SIZES, rope_parameters=dict(parameters))
    )
    rope = spec_from_config(
        {"model_type": "llama", **SIZES, "rope_parameters": parameters}, "config.json"
    ).rope
    assert rope.rotary_dim == 64 * partial
    np.testing.assert_allclose(rope.inv_freq(), frequencies.numpy(), rtol=1e-6)
    assert rope.attention_factor == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("inside", [True, False])
def test_a_partial_rotation_without_scaling_is_that_of_families_that_have_it(inside: bool) -> None:
    """Llama's own class ignores the key where nothing is scaled; Phi-3's shows what it means."""
    from transformers import Phi3Config
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    sizes = {**SIZES, "pad_token_id": 0}
    parameters = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    rotary = Phi3RotaryEmbedding(Phi3Config(**sizes, rope_parameters=dict(parameters)))
    if inside:
        given: dict[str, Any] = {"rope_parameters": parameters}
    else:
        given = {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    rope = spec_from_config({"model_type": "llama", **SIZES, **given}, "config.json").rope
    assert rope.rotary_dim == 32
    np.testing.assert_allclose(rope.inv_freq(), rotary.inv_freq.numpy(), rtol=1e-6)


# Of heads of 64, all of which are rotated.
SHORT = [1.0 + 0.05 * i for i in range(32)]
LONG = [1.0 + 2.0 * i for i in range(32)]
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": SHORT, "long_factor": LONG}

OLD = {"short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 4096}


def check_both_lengths(family: str, settings: dict[str, Any]) -> None:
    """transformers chooses by the sequence it is given, and leaves its choice in `inv_freq`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **copy.deepcopy(settings)))
    rotary = model.model.rotary_emb
    ours = spec_from_config({"model_type": family, **settings}, "config.json").rope
    original = model.config.rope_parameters["original_max_position_embeddings"]
    assert ours.original_max_position == original
    found = []
    for length in (1, original, original + 1, 2 * original):
        rotary(torch.zeros(1), torch.arange(length)[None])
        chosen = ours.for_context(length)
        np.testing.assert_allclose(chosen.inv_freq(), rotary.inv_freq.numpy(), rtol=1e-6)
        assert chosen.attention_factor == pytest.approx(rotary.attention_scaling, rel=1e-12)
        found.append(chosen)
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert repr(found[1]) != repr(found[2])


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": LONG}},
        {"rope_scaling": {**OLD, "type": "su"}, "rope_theta": 5e5},
        {"rope_scaling": {**OLD, "rope_type": "yarn"}},
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 1024},
        {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 2048}},  # not Phi-3's to say
        {"rope_parameters": LONGROPE, "max_position_embeddings": 65536},
        {"rope_parameters": {**LONGROPE, "factor": 16.0}},
        {"rope_parameters": {**LONGROPE, "attention_factor": 1.25}},
        {
            "rope_parameters": {
                **LONGROPE,
                "partial_rotary_factor": 0.75,
                "short_factor": SHORT[:24],
                "long_factor": LONG[:24],
            }
        },
        {
            "partial_rotary_factor": 0.75,
            "rope_scaling": {"type": "longrope", "short_factor": SHORT[:24], "long_factor": LONG[:24]},
        },
    ],
    ids=str,
)
def test_longrope_has_transformers_frequencies_for_either_length(changes: dict[str, Any]) -> None:
    check_both_lengths("phi3", {**SIZES, "pad_token_id": 0, **changes})


@pytest.mark.parametrize(
    "parameters",
    [
        {**LONGROPE, "original_max_position_embeddings": 1024},
        {**LONGROPE, "original_max_position_embeddings": 1024, "factor": 2},
        LONGROPE,
    ],
    ids=str,
)
def test_other_families_may_have_longrope(parameters: dict[str, Any]) -> None:
    check_both_lengths("llama", {**SIZES, "rope_parameters": parameters})


@pytest.mark.parametrize("inside", [True, False])
def test_phi3s_partial_rotation(inside: bool) -> None:
    parameters = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    changes: dict[str, Any] = {"rope_parameters": parameters} if inside else {"partial_rotary_factor": 0.5}
    check("phi3", {**SIZES, "pad_token_id": 0, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_theta": 5e5, "rope_local_base_freq": 2e4},
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {
            "rope_parameters": {
                "full_attention": {**YARN, "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
            }
        },
        {  # as GPTQModel writes it
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
                "rope_theta": {"global": 1e6, "local": 1e4},
                "rope_type": "default",
            }
        },
    ],
    ids=str,
)
def test_windows_with_a_rope_of_their_own(changes: dict[str, Any]) -> None:
    from transformers import Gemma3TextConfig
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

    settings = {**SIZES, "num_hidden_layers": 6, "head_dim": 64}
    ours = spec_from_config({"model_type": "gemma3_text", **settings, **changes}, "config.json")
    rotary = Gemma3RotaryEmbedding(Gemma3TextConfig(**settings, **copy.deepcopy(changes)))
    assert [ours.rope_index(layer) for layer in range(6)] == [1, 1, 1, 1, 1, 0]
    for rope, kind in zip(ours.ropes, ("full_attention", "sliding_attention"), strict=True):
        np.testing.assert_allclose(rope.inv_freq(), getattr(rotary, f"{kind}_inv_freq").numpy(), rtol=1e-6)
        factor = getattr(rotary, f"{kind}_attention_scaling")
        assert rope.attention_factor == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize(
    ("parameters", "key"),
    [
        ({"rope_type": "linear"}, "factor is missing"),
        ({"rope_type": "linear", "factor": 0}, "factor is 0"),
        ({"rope_type": "linear", "factor": None}, "factor is None"),
        ({"rope_type": "linear", "factor": "2"}, "factor is '2'"),
        ({"rope_type": None}, "rope_type is None"),
        ({"rope_type": "yarn"}, "factor is missing"),
        ({**YARN, "original_max_position_embeddings": 0}, "original_max_position_embeddings is 0"),
        ({**YARN, "truncate": 1}, "truncate is 1"),
        ({**YARN, "beta_fast": -1}, "beta_fast is -1"),
        ({**YARN, "attention_factor": -1.0}, "attention_factor is -1.0"),
        ({**YARN, "rope_theta": 1.0}, "rope_theta is 1.0"),
        ({**LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor is 1.0"),
        ({key: LLAMA3[key] for key in LLAMA3 if key != "low_freq_factor"}, "low_freq_factor is missing"),
        ({**LONGROPE, "long_factor": LONG[:31]}, "long_factor is [1.0"),
        ({**LONGROPE, "short_factor": [*SHORT[:31], 0]}, "short_factor.31 is 0"),
        ({**LONGROPE, "short_factor": [*SHORT[:31], "1"]}, "short_factor.31 is '1'"),
        ({**LONGROPE, "short_factor": 1.0}, "short_factor is 1.0"),
        ({"rope_type": "longrope", "short_factor": SHORT}, "long_factor is missing"),
        ({**LONGROPE, "original_max_position_embeddings": 1}, "original_max_position_embeddings is 1"),
    ],
    ids=str,
)
def test_a_bad_value_is_named(parameters: dict[str, Any], key: str) -> None:
    settings = {"model_type": "llama", **SIZES, "rope_parameters": parameters}
    with pytest.raises(ModelFormatError) as caught:
        spec_from_config(settings, "config.json")
    assert str(caught.value).startswith(f"config.json: rope_parameters.{key}")


FREQUENCIES = """
import hashlib, numpy
from nybble.models.spec import RopeSpec
digest = hashlib.sha256()
for scaling in ("none", "linear", "llama3", "yarn", "longrope"):
    for theta in (1e4, 5e5, 1e6):
        rope = RopeSpec(theta, 96, scaling, factor=4.0, original_max_position=1024, short_factor=(1.1,) * 48)
        digest.update(rope.inv_freq().tobytes())
print(digest.hexdigest())
"""


def test_frequencies_have_the_same_bits_whatever_numpy_finds_in_the_cpu() -> None:
    from numpy._core._multiarray_umath import __cpu_dispatch__  # type: ignore[attr-defined]

    def digest(disabled: str) -> str:
        environment = {**os.environ, "NPY_DISABLE_CPU_FEATURES": disabled}
        command = [sys.executable, "-W", "ignore", "-c", FREQUENCIES]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    assert digest("") == digest(" ".join(__cpu_dispatch__))
