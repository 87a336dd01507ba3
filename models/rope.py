"""`RopeSpec` from a config, resolved as transformers resolves it (`modeling_rope_utils.py`, 5.x)."""

import math

from ..errors import UnsupportedModelError
from .config_reader import ConfigReader, shown
from .spec import RopeSpec

DEFAULT_THETA = 10_000.0
SUPPORTED = "default, linear, llama3, yarn, longrope"


def rope_from_config(
    reader: ConfigReader, head_dim: int, max_position: int, default_theta: float = DEFAULT_THETA
) -> RopeSpec:
    """The rotary embedding of a config in either form: transformers 5's `rope_parameters`, or the older
    `rope_theta`, `rope_scaling` and `partial_rotary_factor` beside each other. `rope_scaling` goes first
    where a config has both, and a value inside the object before one beside it.

    Raises `ModelFormatError` for a value out of range, `UnsupportedModelError` for another `rope_type`.
    """
    inner = reader.section("rope_scaling") or reader.section("rope_parameters")
    inner = inner or ConfigReader({}, reader.where, "rope_parameters.")
    nested = next((key for key, value in inner.config.items() if isinstance(value, dict)), None)
    if nested is not None:
        raise UnsupportedModelError(
            f"{reader.where}: {inner.prefix}{shown(nested)} gives some layers a RoPE of their own, "
            "which is not supported"
        )

    rope_type = inner.string("rope_type", inner.config.get("type", "default"))
    theta_reader = inner if inner.has("rope_theta") else reader
    theta = theta_reader.number("rope_theta", default_theta, above=1.0, nullable=True)
    partial_reader = inner if inner.has("partial_rotary_factor") else reader
    partial = partial_reader.number("partial_rotary_factor", 1.0, high=1.0, nullable=True)
    rotary_dim = int(head_dim * partial)
    if rotary_dim < 2 or rotary_dim % 2:
        raise UnsupportedModelError(
            f"{reader.where}: RoPE would rotate {rotary_dim} elements of each head (head_dim {head_dim}, "
            f"partial_rotary_factor {partial:g}), which is not an even number above zero"
        )

    match rope_type:
        case "default" | "none":
            return RopeSpec(theta, rotary_dim)
        case "linear":
            return RopeSpec(theta, rotary_dim, "linear", inner.number("factor"))
        case "llama3":
            return _llama3(reader, inner, theta, rotary_dim, max_position)
        case "yarn":
            return _yarn(reader, inner, theta, rotary_dim, max_position)
        case "longrope":
            return _longrope(reader, inner, theta, rotary_dim, max_position)
    raise inner.unsupported("rope_type" if inner.has("rope_type") else "type", rope_type, SUPPORTED)


def _original_max_position(reader: ConfigReader, inner: ConfigReader, max_position: int) -> int:
    key = "original_max_position_embeddings"
    return (reader if reader.has(key) else inner).integer(key, max_position)


def _llama3(
    reader: ConfigReader, inner: ConfigReader, theta: float, rotary_dim: int, max_position: int
) -> RopeSpec:
    low = inner.number("low_freq_factor")
    return RopeSpec(
        theta,
        rotary_dim,
        "llama3",
        factor=inner.number("factor"),
        original_max_position=_original_max_position(reader, inner, max_position),
        low_freq_factor=low,
        # The blend divides by the difference of the two.
        high_freq_factor=inner.number("high_freq_factor", above=low),
    )


def _yarn(
    reader: ConfigReader, inner: ConfigReader, theta: float, rotary_dim: int, max_position: int
) -> RopeSpec:
    original = _original_max_position(reader, inner, max_position)
    if "factor" in inner.config and inner.config["factor"] is None:
        factor = max_position / original
    else:
        factor = inner.number("factor")
    return RopeSpec(
        theta,
        rotary_dim,
        "yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=_zero_is_default(inner, "beta_fast", 32.0),
        beta_slow=_zero_is_default(inner, "beta_slow", 1.0),
        truncate=inner.flag("truncate", True),
        attention_factor=_yarn_attention_factor(inner, factor),
    )


def _zero_is_default(inner: ConfigReader, key: str, default: float) -> float:
    """transformers takes its default for 0 as for null."""
    if inner.config.get(key) == 0 and not isinstance(inner.config[key], bool):
        return default
    return inner.number(key, default, nullable=True)


def _yarn_attention_factor(inner: ConfigReader, factor: float) -> float:
    """What multiplies cos and sin: given, or from the paper's 0.1 ln(factor) + 1 with DeepSeek's two
    weights of it (https://arxiv.org/abs/2309.00071, section 3.4)."""
    if inner.has("attention_factor"):
        return inner.number("attention_factor")

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    weights = [_zero_is_default(inner, key, 0.0) for key in ("mscale", "mscale_all_dim")]
    if all(weights):
        return magnitude(weights[0]) / magnitude(weights[1])
    return magnitude(1.0)


def _longrope(
    reader: ConfigReader, inner: ConfigReader, theta: float, rotary_dim: int, max_position: int
) -> RopeSpec:
    original = _original_max_position(reader, inner, max_position)
    factor = inner.number("factor", max_position / original, nullable=True)
    short, long = (inner.numbers(key, rotary_dim // 2) for key in ("short_factor", "long_factor"))
    return RopeSpec(
        theta,
        rotary_dim,
        "longrope",
        factor=factor,
        original_max_position=original,
        attention_factor=_longrope_attention_factor(inner, factor, original),
        short_factor=short,
        long_factor=long,
    )


def _longrope_attention_factor(inner: ConfigReader, factor: float, original: int) -> float:
    """What multiplies cos and sin, whichever factors apply: given, or the paper's square root of
    1 + ln(factor) / ln(original) (https://arxiv.org/abs/2402.13753, section 3)."""
    if inner.has("attention_factor"):
        return inner.number("attention_factor")
    if factor <= 1:
        return 1.0
    if original == 1:
        raise inner.error("original_max_position_embeddings", original, "at least 2")
    return math.sqrt(1 + math.log(factor) / math.log(original))
