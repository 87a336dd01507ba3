"""Qwen3 (dense): RMSNorm on q and k, a head_dim of its own, biases only where the config asks for them."""

from .config_reader import ConfigReader
from .decoder import decoder_spec, layer_count
from .qwen2 import qwen_windows
from .spec import ModelSpec


def qwen3(reader: ConfigReader) -> ModelSpec:
    """`Qwen3ForCausalLM`."""
    layers = layer_count(reader)
    attention_bias = reader.flag("attention_bias", False)
    return decoder_spec(
        reader,
        model_type="qwen3",
        num_layers=layers,
        sliding_windows=qwen_windows(reader, layers),
        default_max_position=32768,
        default_kv_heads=32,
        default_head_dim=128,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm=True,
    )
