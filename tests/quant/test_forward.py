"""Our forward pass against transformers' float32 logits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nybble.models import open_source
from nybble.quant.forward import logits

torch = pytest.importorskip("torch")

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "head_dim": ("llama", {"head_dim": 24, "num_attention_heads": 4, "num_key_value_heads": 1}),
    "llama3 rope": (
        "llama",
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "yarn": (
        "llama",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    ),
    "sliding window": ("mistral", {"sliding_window": 16}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
}


@pytest.mark.parametrize("which", MODELS)
def test_logits_equal_transformers(make_tiny_model: Callable[..., Path], which: str) -> None:
    from transformers import AutoModelForCausalLM

    family, overrides = MODELS[which]
    folder = make_tiny_model(family, **overrides)
    ids = np.random.default_rng(1).integers(0, 512, (3, 80))
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        expected = reference(torch.from_numpy(ids)).logits
    source = open_source(folder)
    found = logits(source, ids, batch=2)
    assert found.shape == (3, 80, 512)
    assert (found - expected).abs().max() < 1e-4
