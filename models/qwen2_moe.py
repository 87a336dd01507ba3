"""Qwen1.5-MoE and Qwen2-MoE: qwen2 with a mixture of experts, and an expert that all tokens share."""

from dataclasses import replace

from .config_reader import ConfigReader
from .decoder import decoder_spec, layer_count, layer_type_windows
from .mixture import qwen_mixture
from .qwen2 import qwen_window
from .spec import ModelSpec

KEYS = ("num_experts",)


def qwen2_moe(reader: ConfigReader) -> ModelSpec:
    """`Qwen2MoeForCausalLM`."""
    layers = layer_count(reader)
    spec = decoder_spec(
        reader,
        model_type="qwen2_moe",
        num_layers=layers,
        sliding_windows=_windows(reader, layers),
        default_max_position=32768,
        default_kv_heads=16,
        qkv_bias=reader.flag("qkv_bias", True),
        own_keys=KEYS,
    )
    mixture = qwen_mixture(
        reader,
        layers,
        keys=KEYS,
        default_experts=60,
        default_per_token=4,
        default_intermediate=1408,
        default_shared=5632,
    )
    return replace(spec, mixture=mixture)


def _windows(reader: ConfigReader, layers: int) -> tuple[int | None, ...]:
    """`layer_types` where given; else, with `use_sliding_window`, every other layer under
    `max_window_layers` has `sliding_window`. (Qwen2 has it the other way round: from that layer on.)"""
    window = qwen_window(reader)
    if reader.has("layer_types"):
        return layer_type_windows(reader, layers, window)
    last = reader.integer("max_window_layers", 28, low=0)
    return tuple(window if layer < last and layer % 2 == 0 else None for layer in range(layers))
