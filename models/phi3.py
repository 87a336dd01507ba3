"""Phi-3, Phi-3.5, Phi-4: q, k and v in one linear layer, gate and up in another; partial RoPE, longrope."""

from dataclasses import replace

from .config_reader import ConfigReader
from .decoder import decoder_spec, layer_count, same_window
from .spec import ModelSpec

ORIGINAL = "original_max_position_embeddings"


def phi3(reader: ConfigReader) -> ModelSpec:
    """`Phi3ForCausalLM`: no biases, one window for all layers."""
    layers = layer_count(reader)
    window = reader.integer("sliding_window") if reader.has("sliding_window") else None
    spec = decoder_spec(
        _rope_reader(reader),
        model_type="phi3",
        num_layers=layers,
        sliding_windows=same_window(reader, layers, window),
        default_max_position=4096,
        default_norm_eps=1e-5,
    )
    return replace(spec, fused_projections=True)


def _rope_reader(reader: ConfigReader) -> ConfigReader:
    """The config with its RoPE as other families have it. "su" and "yarn" are this family's older names of
    longrope, and the original context has a default of its own, which goes before one beside the factors."""
    config = {**reader.config, ORIGINAL: reader.integer(ORIGINAL, 4096)}
    for key in ("rope_scaling", "rope_parameters"):
        rope = reader.section(key)
        if rope is None:
            continue
        kind = rope.string("rope_type", rope.config.get("type", "default"))
        if kind not in ("default", "longrope", "su", "yarn"):
            raise rope.unsupported(
                "rope_type" if rope.has("rope_type") else "type", kind, "default, longrope"
            )
        config[key] = {**rope.config, "rope_type": "longrope" if kind in ("su", "yarn") else kind}
    return ConfigReader(config, reader.where, reader.prefix)
