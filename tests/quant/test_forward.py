"""Our forward pass against transformers' float32 logits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoders import FAMILY_CASES

from nybble.models import open_source
from nybble.models.spec import LinearSpec, ModelSpec, RopeSpec
from nybble.quant.forward import (
    activate,
    attention,
    embed,
    forward_layer,
    head_logits,
    logits,
    rotate,
    to_torch,
)

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
    **FAMILY_CASES,
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


def make_spec(**changes: Any) -> ModelSpec:
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_layers": 1}
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "max_position": 64}
    fields = {"norm_eps": 1e-5, "rope": RopeSpec(1e4, 8)} | sizes | heads | changes
    return ModelSpec(model_type="llama", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_attention_by_loops(window: int | None, softcap: float | None, scale: float | None) -> None:
    spec = make_spec(sliding_windows=(window,), attention_softcap=softcap, attention_scale=scale)
    random = np.random.default_rng(0)
    q, k, v = (random.normal(size=(2, heads, 9, 8)).astype(np.float32) for heads in (4, 2, 2))
    found = attention(spec, 0, *(torch.from_numpy(x) for x in (q, k, v))).numpy()
    for b, head, i in np.ndindex(2, 4, 9):
        first = 0 if window is None else max(0, i - window + 1)
        scores = k[b, head // 2, first : i + 1].astype(np.float64) @ q[b, head, i] * (scale or 8**-0.5)
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        share = np.exp(scores) / np.exp(scores).sum()
        assert np.allclose(found[b, head, i], share @ v[b, head // 2, first : i + 1], atol=1e-5)


def test_partial_rope_leaves_the_rest_of_a_head() -> None:
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(1, 1, 3, 8)).astype(np.float32))
    angles = torch.tensor([[0.0, 0.0], [0.5, 0.1], [1.0, 0.2]])
    angles = torch.cat((angles, angles), 1)
    turned = rotate(x, (angles.cos(), angles.sin())).numpy()[0, 0]
    plain = x.numpy()[0, 0]
    assert np.array_equal(turned[:, 4:], plain[:, 4:])
    for position, pair in np.ndindex(3, 2):
        whole = complex(plain[position, pair], plain[position, pair + 2])
        expected = whole * np.exp(1j * float(angles[position, pair]))
        assert np.isclose(turned[position, pair], expected.real, atol=1e-6)
        assert np.isclose(turned[position, pair + 2], expected.imag, atol=1e-6)


def test_embedding_scale_and_logit_softcap() -> None:
    spec = make_spec(embedding_scale=3.0, logit_softcap=2.0)
    table = torch.from_numpy(np.random.default_rng(0).normal(size=(50, 32)).astype(np.float32))
    hidden = embed(spec, table, np.array([[4, 7]]))
    assert np.allclose(hidden.numpy(), 3 * table.numpy()[[[4, 7]]])
    found = head_logits(spec, torch.ones(32), table, hidden).numpy()
    x = hidden.numpy() / np.sqrt((hidden.numpy() ** 2).mean(-1, keepdims=True) + 1e-5)
    assert np.allclose(found, 2 * np.tanh(x @ table.numpy().T / 2), atol=1e-5)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
def test_activations(activation: Any) -> None:
    from transformers.activations import ACT2FN

    name = {"gelu_tanh": "gelu_pytorch_tanh"}.get(activation, activation)
    x = torch.linspace(-5, 5, 41)
    assert torch.allclose(ACT2FN[name](x), activate(x.clone(), activation), atol=1e-6)


def test_before_sees_each_input_and_may_replace_weights(make_tiny_model: Callable[..., Path]) -> None:
    source = open_source(make_tiny_model("llama"))
    spec = source.spec
    weights = {name: to_torch(source.tensor(name)) for name in spec.layer_tensors(0)}
    hidden = torch.from_numpy(np.random.default_rng(0).normal(size=(3, 10, 64)).astype(np.float32))
    seen: list[tuple[list[str], tuple[int, ...]]] = []

    def before(linears: tuple[LinearSpec, ...], inputs: Any) -> None:
        seen.append(([linear.name.split(".")[-2] for linear in linears], tuple(inputs.shape)))
        for linear in linears:
            weights[linear.name] = torch.zeros_like(weights[linear.name])

    start = hidden.clone()
    forward_layer(spec, 0, weights, hidden, batch=2, before=before)
    assert seen == [
        (["q_proj", "k_proj", "v_proj"], (30, 64)),
        (["o_proj"], (30, 64)),
        (["gate_proj", "up_proj"], (30, 64)),
        (["down_proj"], (30, 96)),
    ]
    assert torch.equal(hidden, start)  # every linear layer gives zero, so only the residual is left
