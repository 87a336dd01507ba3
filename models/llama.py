"""Llama 1 to 3, SmolLM2 and others of that shape; Mistral, which is the same with a sliding window."""

from ..errors import UnsupportedModelError
from .config_reader import ConfigReader
from .decoder import decoder_spec, layer_count, layer_type_windows
from .spec import ModelSpec


def llama(reader: ConfigReader) -> ModelSpec:
    """`LlamaForCausalLM`: every layer attends to everything."""
    layers = layer_count(reader)
    attention_bias = reader.flag("attention_bias", False)
    return decoder_spec(
        reader,
        model_type="llama",
        num_layers=layers,
        sliding_windows=_same_window(reader, layers, None),
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
        sliding_windows=_same_window(reader, layers, window),
        default_max_position=4096 * 32,
        default_kv_heads=8,
    )


def _same_window(reader: ConfigReader, layers: int, window: int | None) -> tuple[int | None, ...]:
    """transformers' classes for these two ignore `layer_types`, so one that disagrees was meant for another
    class (Ministral's, say)."""
    windows = (window,) * layers
    if reader.has("layer_types") and layer_type_windows(reader, layers, window) != windows:
        kind = "full_attention" if window is None else "sliding_attention"
        raise UnsupportedModelError(
            f"{reader.where}: layer_types mixes kinds of attention; this family has {kind} in every layer"
        )
    return windows
