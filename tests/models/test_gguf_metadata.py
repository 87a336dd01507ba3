"""What a GGUF file's metadata says of a model: its rope, and the tokens that end a turn."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tiny_gguf import HEAD, INNER, LAYERS, tiny

from nybble.errors import ModelFormatError, UnsupportedModelError
from nybble.models.gguf_config import llama3_factors
from nybble.models.gguf_source import open_gguf


@pytest.mark.parametrize(("factor", "theta"), [(8.0, 500000.0), (32.0, 500000.0), (4.0, 10000.0)])
def test_llama3_rope_factors_become_parameters(
    write: Callable[..., Path], factor: float, theta: float
) -> None:
    """Against transformers' own scaling: the factors are computed from its frequencies."""
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    sizes = {"hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "rope_theta": theta}
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = AutoConfig.for_model(
        "llama", **sizes, rope_scaling=dict(scaling), max_position_embeddings=131072
    )
    theirs = ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")[0].numpy()
    base = theta ** -(np.arange(0, 128, 2) / 128)
    metadata, tensors = tiny(
        embedding_length=512, attention__head_count=4, context_length=131072, rope__freq_base=theta
    )
    tensors = {
        name: np.zeros((512,) if "norm" in name else (len(values), 512), np.float32)
        for name, values in tensors.items()
    }
    for layer in range(LAYERS):
        for name, shape in {
            "attn_q": (512, 512),
            "attn_output": (512, 512),
            "ffn_down": (512, INNER),
        }.items():
            tensors[f"blk.{layer}.{name}.weight"] = np.zeros(shape, np.float32)
        for name in ("attn_k", "attn_v"):
            tensors[f"blk.{layer}.{name}.weight"] = np.zeros((256, 512), np.float32)
    tensors["rope_freqs.weight"] = (base / theirs).astype(np.float32)
    with open_gguf(write(metadata, tensors), "m") as source:
        assert source.config["rope_scaling"] == scaling
        np.testing.assert_allclose(source.spec.rope.inv_freq(), theirs, rtol=1e-6)
        assert "rope_freqs.weight" not in source.spec.tensors()


def test_rope_factors_of_another_scaling_are_refused(write: Callable[..., Path]) -> None:
    metadata, tensors = tiny()
    tensors["rope_freqs.weight"] = np.linspace(1, 8, HEAD // 2, dtype=np.float32)
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight does not follow"):
        open_gguf(write(metadata, tensors), "m")
    tensors["rope_freqs.weight"] = np.ones(3, np.float32)
    with pytest.raises(ModelFormatError, match=r"has shape \(3,\); expected \(4,\)"):
        open_gguf(write(metadata, tensors), "m")
    tensors["rope_freqs.weight"] = np.ones(HEAD // 2, np.float32)
    with open_gguf(write(metadata, tensors), "m") as source:
        assert source.spec.rope.scaling == "none"


def test_llama3_factors_have_their_three_regions() -> None:
    factors = llama3_factors(500000.0, 128, 8.0, 1.0, 4.0, 8192)
    assert (factors[:29] == 1).all()
    assert (factors[35:] == 8).all()
    assert (np.diff(factors[28:36]) > 0).all()


def test_rope_scalings_of_the_metadata(write: Callable[..., Path]) -> None:
    metadata, tensors = tiny(rope__scaling__type="linear", rope__scaling__factor=4.0)
    with open_gguf(write(metadata, tensors), "m") as source:
        assert (source.spec.rope.scaling, source.spec.rope.factor) == ("linear", 4.0)
    metadata, tensors = tiny(rope__scale_linear=2.0)
    with open_gguf(write(metadata, tensors), "m") as source:
        assert (source.spec.rope.scaling, source.spec.rope.factor) == ("linear", 2.0)
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
    metadata, tensors = tiny(**yarn, rope__scaling__original_context_length=32)
    with open_gguf(write(metadata, tensors), "m") as source:
        rope = source.spec.rope
        assert (rope.scaling, rope.factor, rope.original_max_position) == ("yarn", 4.0, 32)
        # https://arxiv.org/abs/2309.00071, section 3.4
        assert rope.attention_factor == pytest.approx(0.1 * np.log(4) + 1)
    metadata, tensors = tiny(**yarn, rope__scaling__attn_factor=0.5, rope__scaling__yarn_beta_fast=16.0)
    with open_gguf(write(metadata, tensors), "m") as source:
        assert source.spec.rope.attention_factor == pytest.approx(0.5 * (0.1 * np.log(4) + 1))
        assert (source.spec.rope.beta_fast, source.spec.rope.beta_slow) == (16.0, 1.0)


def test_every_token_that_ends_a_turn_is_a_stop_token(write: Callable[..., Path]) -> None:
    metadata, tensors = tiny()
    metadata |= {"tokenizer.ggml.eot_token_id": 258, "tokenizer.ggml.padding_token_id": 0}
    with open_gguf(write(metadata, tensors), "m") as source:
        assert source.generation_config == {
            "bos_token_id": 259,
            "eos_token_id": [257, 258],
            "pad_token_id": 0,
        }
