"""OLMo 2: norms on what attention and MLP give instead of what they read, and on all of q and of k."""

from dataclasses import replace

from .config_reader import ConfigReader
from .decoder import decoder_spec, layer_count, same_window
from .spec import ModelSpec


def olmo2(reader: ConfigReader) -> ModelSpec:
    """`Olmo2ForCausalLM`."""
    layers = layer_count(reader)
    attention_bias = reader.flag("attention_bias", False)
    spec = decoder_spec(
        reader,
        model_type="olmo2",
        num_layers=layers,
        sliding_windows=same_window(reader, layers, None),
        default_max_position=2048,
        default_norm_eps=1e-5,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm=True,
    )
    return replace(spec, norm_placement="after", qk_norm_per_head=False)
