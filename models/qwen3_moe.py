"""Qwen3-MoE: qwen3 with a mixture of experts; one window for all layers, if at all."""

from dataclasses import replace

from .config_reader import ConfigReader
from .decoder import decoder_spec, layer_count, same_window
from .mixture import qwen_mixture
from .qwen2 import qwen_window
from .spec import ModelSpec

KEYS = ("num_experts", "num_local_experts")


def qwen3_moe(reader: ConfigReader) -> ModelSpec:
    """`Qwen3MoeForCausalLM`."""
    layers = layer_count(reader)
    attention_bias = reader.flag("attention_bias", False)
    spec = decoder_spec(
        reader,
        model_type="qwen3_moe",
        num_layers=layers,
        sliding_windows=same_window(reader, layers, qwen_window(reader)),
        default_max_position=32768,
        default_kv_heads=4,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm=True,
        own_keys=KEYS,
    )
    mixture = qwen_mixture(
        reader, layers, keys=KEYS, default_experts=128, default_per_token=8, default_intermediate=768
    )
    return replace(spec, mixture=mixture)
