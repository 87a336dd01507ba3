"""Granite 3 and 4 (dense): llama with four multipliers."""

from dataclasses import replace

from .config_reader import ConfigReader
from .decoder import decoder_spec, layer_count, same_window
from .spec import ModelSpec

MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")


def granite(reader: ConfigReader) -> ModelSpec:
    """`GraniteForCausalLM`."""
    layers = layer_count(reader)
    attention_bias = reader.flag("attention_bias", False)
    spec = decoder_spec(
        reader,
        model_type="granite",
        num_layers=layers,
        sliding_windows=same_window(reader, layers, None),
        default_max_position=2048,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=reader.flag("mlp_bias", False),
        own_keys=MULTIPLIERS,
    )
    embedding, attention, residual, logits = (reader.number(key, 1.0) for key in MULTIPLIERS)
    return replace(
        spec,
        embedding_scale=embedding,
        attention_scale=attention,
        residual_scale=residual,
        logit_scale=1 / logits,
    )
