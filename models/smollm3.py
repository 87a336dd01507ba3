"""SmolLM3: llama with RoPE in three layers of four."""

from dataclasses import replace

from .config_reader import ConfigReader
from .decoder import decoder_spec, layer_count, layer_type_windows
from .spec import ModelSpec


def smollm3(reader: ConfigReader) -> ModelSpec:
    """`SmolLM3ForCausalLM`."""
    layers = layer_count(reader)
    attention_bias = reader.flag("attention_bias", False)
    unrotated = _unrotated_layers(reader, layers)
    spec = decoder_spec(
        reader,
        model_type="smollm3",
        num_layers=layers,
        sliding_windows=_windows(reader, layers, unrotated),
        default_max_position=32768,
        default_kv_heads=4,
        default_theta=2e6,
        default_tied=True,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=reader.flag("mlp_bias", False),
        own_keys=("no_rope_layers",),
    )
    return replace(spec, unrotated_layers=unrotated)


def _unrotated_layers(reader: ConfigReader, layers: int) -> tuple[int, ...]:
    """Those with a 0 in `no_rope_layers`; without the key, every `no_rope_layer_interval`th."""
    if not reader.has("no_rope_layers"):
        interval = reader.integer("no_rope_layer_interval", 4)
        return tuple(range(interval - 1, layers, interval))
    rotated = reader.config["no_rope_layers"]
    if not isinstance(rotated, list) or len(rotated) < layers or any(x not in (0, 1) for x in rotated):
        raise reader.error("no_rope_layers", rotated, f"a list of 0 and 1, one for each of {layers} layers")
    return tuple(layer for layer in range(layers) if rotated[layer] == 0)


def _windows(reader: ConfigReader, layers: int, unrotated: tuple[int, ...]) -> tuple[int | None, ...]:
    """By `layer_types`; without it, a window is that of the layers without RoPE."""
    window = None
    if reader.flag("use_sliding_window", False) and reader.has("sliding_window"):
        window = reader.integer("sliding_window")
    if reader.has("layer_types"):
        return layer_type_windows(reader, layers, window)
    return tuple(window if layer in unrotated else None for layer in range(layers))
