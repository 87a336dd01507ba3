"""Qwen2 and Qwen2.5: biases on q, k and v; a sliding window in the upper layers, if at all."""

from .config_reader import ConfigReader
from .decoder import decoder_spec, layer_count, layer_type_windows
from .spec import ModelSpec


def qwen2(reader: ConfigReader) -> ModelSpec:
    """`Qwen2ForCausalLM`."""
    layers = layer_count(reader)
    return decoder_spec(
        reader,
        model_type="qwen2",
        num_layers=layers,
        sliding_windows=qwen_windows(reader, layers),
        default_max_position=32768,
        default_kv_heads=32,
        qkv_bias=True,
    )


def qwen_window(reader: ConfigReader) -> int | None:
    """`sliding_window`, if `use_sliding_window` says so; which layers have it differs by family."""
    given = reader.has("sliding_window") or "sliding_window" not in reader.config
    use = reader.flag("use_sliding_window", False)
    return reader.integer("sliding_window", 4096) if use and given else None


def qwen_windows(reader: ConfigReader, layers: int) -> tuple[int | None, ...]:
    """Qwen's windows: `layer_types` where given; else, with `use_sliding_window`, the layers from
    `max_window_layers` on have `sliding_window`."""
    window = qwen_window(reader)
    if reader.has("layer_types"):
        return layer_type_windows(reader, layers, window)
    full = reader.integer("max_window_layers", 28, low=0)
    return tuple(window if layer >= full else None for layer in range(layers))
