"""Llama 1 to 3, SmolLM2 and others of that shape; Mistral, which is the same with a sliding window."""

from .config_reader import ConfigReader
from .decoder import decoder_spec, layer_count, same_window
from .spec import ModelSpec


def llama(reader: ConfigReader) -> ModelSpec:
    """`LlamaForCausalLM`: every layer attends to everything."""
    layers = layer_count(reader)
    attention_bias = reader.flag("attention_bias", False)
    return decoder_spec(
        reader,
        model_type="llama",
        num_layers=layers,
        sliding_windows=same_window(reader, layers, None),
        default_max_position=2048,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=reader.flag("mlp_bias", False),
    )


def mistral(reader: ConfigReader) -> ModelSpec:
    """`MistralForCausalLM`: no biases, one window for all layers; 4096 where the key is absent, none where
    it is null."""
    layers = layer_count(reader)
    window = None
    if reader.has("sliding_window") or "sliding_window" not in reader.config:
        window = reader.integer("sliding_window", 4096)
    return decoder_spec(
        reader,
        model_type="mistral",
        num_layers=layers,
        sliding_windows=same_window(reader, layers, window),
        default_max_position=4096 * 32,
        default_kv_heads=8,
    )
