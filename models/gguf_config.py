"""From GGUF metadata to the Hugging Face `config.json` that it was converted from, as far as it matters."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelFormatError, UnsupportedModelError
from .gguf_families import FAMILIES
from .gguf_metadata import Metadata

# Metadata of other architectures that changes what is computed; absent or 0 where it is not used.
_FOREIGN = (
    *("expert_count", "attention.scale", "attention.clamp_kqv", "attention.max_alibi_bias", "logit_scale"),
    *("embedding_scale", "residual_scale", "attn_logit_softcapping", "final_logit_softcapping"),
)
# Original context lengths that llama3 scaling is tried with; Llama 3.1 and 3.2 have the first.
_ORIGINAL_CONTEXTS = (8192, *(1 << n for n in range(10, 18)))


def config_from_metadata(
    meta: Metadata, shapes: Mapping[str, tuple[int, ...]], rope_factors: NDArray[np.float32] | None
) -> dict[str, Any]:
    """A `config.json` for `spec_from_config`. `shapes` are the file's tensors; `rope_factors` is
    `rope_freqs.weight` where the file has it.

    Raises `UnsupportedModelError` for an architecture or feature that is not run, `ModelFormatError` for
    metadata that is missing or inconsistent.
    """
    arch = meta.text("general.architecture")
    family = FAMILIES.get(arch)
    if family is None:
        raise UnsupportedModelError(
            f"{meta.where}: general.architecture is {arch[:60]!r}; supported: {', '.join(FAMILIES)}"
        )
    for name in _FOREIGN:
        if name in family.own_keys:
            continue
        value = meta.values.get(f"{arch}.{name}", 0)
        if not isinstance(value, int | float) or value != 0:
            raise UnsupportedModelError(f"{meta.where}: {arch}.{name} is set, which is not supported")
    embedding = shapes.get("token_embd.weight", ())
    if len(embedding) != 2:
        raise ModelFormatError(f"{meta.where}: tensor 'token_embd.weight' is missing or not a matrix")
    heads = meta.integer(f"{arch}.attention.head_count")
    hidden = meta.integer(f"{arch}.embedding_length")
    if heads == 0 or hidden == 0:
        raise ModelFormatError(f"{meta.where}: {arch}.attention.head_count or embedding_length is 0")
    head_dim = _head_dim(meta, arch, hidden, heads)
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": embedding[0],
        "hidden_size": hidden,
        "intermediate_size": meta.integer(f"{arch}.feed_forward_length"),
        "num_hidden_layers": meta.integer(f"{arch}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.integer(f"{arch}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        family.activation[0]: family.activation[1],
        "max_position_embeddings": meta.integer(f"{arch}.context_length"),
        "rms_norm_eps": meta.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        "rope_theta": meta.number(f"{arch}.rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in shapes,
    }
    scaling = _rope_scaling(meta, arch, config, rope_factors)
    if scaling is not None:
        config["rope_scaling"] = scaling
    biases = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_gate.bias"}
    config |= {key: biases[key] in shapes for key in family.biases}
    family.add_keys(meta, config)
    if "attention.sliding_window" not in family.own_keys:
        _sliding_window(meta, arch, config)
    return config


def _head_dim(meta: Metadata, arch: str, hidden: int, heads: int) -> int:
    key, value = (f"{arch}.attention.{x}_length" for x in ("key", "value"))
    if key not in meta and hidden % heads:
        raise ModelFormatError(
            f"{meta.where}: {arch}.embedding_length {hidden} is no multiple of {heads} heads"
        )
    head_dim = meta.integer(key, hidden // heads)
    for other in (value, f"{arch}.rope.dimension_count"):
        if meta.integer(other, head_dim) != head_dim:
            found = meta.integer(other)
            raise UnsupportedModelError(
                f"{meta.where}: {other} is {found}; only {head_dim}, a head, is supported"
            )
    return head_dim


def _sliding_window(meta: Metadata, arch: str, config: dict[str, Any]) -> None:
    """A llama with a window is what Hugging Face calls mistral; converters write none for the qwens."""
    window = meta.integer(f"{arch}.attention.sliding_window", 0)
    if window == 0 or window >= config["max_position_embeddings"]:
        return
    if arch != "llama" or config["attention_bias"] or config["mlp_bias"]:
        raise UnsupportedModelError(
            f"{meta.where}: {arch}.attention.sliding_window {window} is not supported"
        )
    del config["attention_bias"], config["mlp_bias"]
    config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}


def _rope_scaling(
    meta: Metadata, arch: str, config: dict[str, Any], factors: NDArray[np.float32] | None
) -> dict[str, Any] | None:
    kind = meta.text(f"{arch}.rope.scaling.type", "none")
    factor = meta.number(f"{arch}.rope.scaling.factor", meta.number(f"{arch}.rope.scale_linear", 1.0))
    if f"{arch}.rope.scaling.type" not in meta and factor not in (0.0, 1.0):
        kind = "linear"  # files from before the type was written
    if factors is not None:
        if kind != "none":
            raise UnsupportedModelError(f"{meta.where}: rope_freqs.weight together with {kind} RoPE scaling")
        return _llama3_scaling(meta, config, factors)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise UnsupportedModelError(
            f"{meta.where}: {arch}.rope.scaling.type is {kind[:40]!r}; supported: none, linear, yarn"
        )
    original = f"{arch}.rope.scaling.original_context_length"
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": meta.integer(original, config["max_position_embeddings"]),
    }
    for name in ("beta_fast", "beta_slow"):
        key = f"{arch}.rope.scaling.yarn_{name}"
        if key in meta:
            scaling[name] = meta.number(key)
    attention = meta.number(f"{arch}.rope.scaling.attn_factor", 1.0)
    if attention != 1.0:
        # The metadata's factor multiplies the published one; Hugging Face's replaces it.
        scaling["attention_factor"] = attention * (0.1 * math.log(max(factor, 1.0)) + 1.0)
    return scaling


def llama3_factors(
    theta: float, head_dim: int, factor: float, low: float, high: float, original: int
) -> NDArray[np.float64]:
    """What Llama 3.1's published scaling divides each frequency by, [head_dim / 2] float64."""
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (original / wavelength - low) / (high - low)
    with np.errstate(all="ignore"):  # outside the blended region, where it is not used
        blended = 1 / ((1 - smooth) / factor + smooth)
    return np.where(wavelength < original / high, 1.0, np.where(wavelength > original / low, factor, blended))


def _llama3_scaling(
    meta: Metadata, config: dict[str, Any], factors: NDArray[np.float32]
) -> dict[str, Any] | None:
    """The parameters that give `factors`, to float32's precision; None where all are 1."""
    theta, head_dim = config["rope_theta"], config["head_dim"]
    where = f"{meta.where}: rope_freqs.weight"
    if factors.shape != (head_dim // 2,):
        raise ModelFormatError(f"{where} has shape {factors.shape}; expected ({head_dim // 2},)")
    if (factors == 1).all():
        return None
    factor = float(f"{factors.max():.6g}")
    if theta > 0 and math.isfinite(factor) and factor > 0:
        for original in _ORIGINAL_CONTEXTS:
            if np.allclose(factors, llama3_factors(theta, head_dim, factor, 1.0, 4.0, original), rtol=1e-5):
                return {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": original,
                }
    raise UnsupportedModelError(
        f"{where} does not follow Llama 3's scaling (low 1, high 4); nothing else is run"
    )
