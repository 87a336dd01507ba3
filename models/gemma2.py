"""Gemma 2: norms around attention and MLP, soft caps, a sliding window in every other layer."""

from dataclasses import replace

from .config_reader import ConfigReader
from .decoder import decoder_spec, layer_count, layer_type_windows
from .spec import ModelSpec


def gemma2(reader: ConfigReader) -> ModelSpec:
    """`Gemma2ForCausalLM`."""
    spec = gemma_spec(
        reader,
        model_type="gemma2",
        window_pattern=2,
        default_max_position=8192,
        own_keys=("attn_logit_softcapping", "final_logit_softcapping"),
    )
    return replace(
        spec,
        attention_softcap=soft_cap(reader, "attn_logit_softcapping", 50.0),
        logit_softcap=soft_cap(reader, "final_logit_softcapping", 30.0),
    )


def gemma_spec(
    reader: ConfigReader,
    *,
    model_type: str,
    window_pattern: int,
    default_max_position: int,
    own_keys: tuple[str, ...],
    qk_norm: bool = False,
) -> ModelSpec:
    """What Gemma 2 and 3 have in common. Without `layer_types`, every `window_pattern`th layer sees all."""
    attention_bias = reader.flag("attention_bias", False)
    layers = layer_count(reader)
    spec = decoder_spec(
        reader,
        model_type=model_type,
        num_layers=layers,
        sliding_windows=_windows(reader, layers, window_pattern),
        default_max_position=default_max_position,
        default_kv_heads=4,
        default_head_dim=256,
        default_tied=True,
        activation_key="hidden_activation",
        default_activation="gelu_pytorch_tanh",
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm=qk_norm,
        own_keys=("query_pre_attn_scalar", *own_keys),
    )
    return replace(
        spec,
        norm_placement="around",
        norm_offset=1.0,
        embedding_scale=spec.hidden_size**0.5,
        attention_scale=reader.number("query_pre_attn_scalar", 256) ** -0.5,
    )


def soft_cap(reader: ConfigReader, key: str, default: float | None) -> float | None:
    """None where the key is null."""
    return reader.number(key) if reader.has(key) else None if key in reader.config else default


def _windows(reader: ConfigReader, layers: int, pattern: int) -> tuple[int | None, ...]:
    window = None
    if reader.has("sliding_window") or "sliding_window" not in reader.config:
        window = reader.integer("sliding_window", 4096)
    if reader.has("layer_types"):
        return layer_type_windows(reader, layers, window)
    return tuple(window if (layer + 1) % pattern else None for layer in range(layers))
