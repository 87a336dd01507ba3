"""Mixtral: mistral with a mixture of experts in every layer."""

from dataclasses import replace

from .config_reader import ConfigReader
from .decoder import decoder_spec, layer_count, same_window
from .mixture import mixture_spec
from .spec import ModelSpec

KEYS = ("num_local_experts", "num_experts")


def mixtral(reader: ConfigReader) -> ModelSpec:
    """`MixtralForCausalLM`: `intermediate_size` is each expert's, and the weights of the chosen experts sum
    to 1."""
    layers = layer_count(reader)
    window = reader.integer("sliding_window") if reader.has("sliding_window") else None
    spec = decoder_spec(
        reader,
        model_type="mixtral",
        num_layers=layers,
        sliding_windows=same_window(reader, layers, window),
        default_max_position=4096 * 32,
        default_kv_heads=8,
        default_norm_eps=1e-5,
        default_theta=1e6,
        own_keys=KEYS,
    )
    mixture = mixture_spec(
        reader,
        tuple(range(layers)),
        names="mixtral",
        keys=KEYS,
        default_experts=8,
        default_per_token=2,
        intermediate_size=spec.intermediate_size,
        normalized=True,
    )
    return replace(spec, mixture=mixture)
