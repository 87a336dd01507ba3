"""Gemma 3 without pictures: norms on q and k, five layers of six with a window and a RoPE of their own."""

from dataclasses import replace
from typing import Any

from ..errors import UnsupportedModelError
from .config_reader import ConfigReader, shown
from .gemma2 import gemma_spec, soft_cap
from .rope import DEFAULT_THETA, rope_from_config
from .spec import ModelSpec

FULL, SLIDING = "full_attention", "sliding_attention"
# GPTQModel writes these beside the two, which have their own; transformers reads neither then.
UNREAD = ("rope_theta", "rope_type")
ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta")


def gemma3_text(reader: ConfigReader) -> ModelSpec:
    """`Gemma3ForCausalLM`. Its soft cap of attention is a key that transformers reads and does not use, so a
    config that sets it is refused."""
    full, sliding = _rope_readers(reader)
    spec = gemma_spec(
        full,
        model_type="gemma3_text",
        window_pattern=reader.integer("sliding_window_pattern", 6),
        default_max_position=131_072,
        own_keys=("final_logit_softcapping",),
        qk_norm=True,
    )
    return replace(
        spec,
        logit_softcap=soft_cap(reader, "final_logit_softcapping", None),
        window_rope=rope_from_config(sliding, spec.head_dim, spec.max_position),
    )


def _rope_readers(reader: ConfigReader) -> tuple[ConfigReader, ConfigReader]:
    """The config as a family with one RoPE has it: with that of full attention, and with that of windows.

    transformers 5 has both in `rope_parameters`; before, `rope_theta` and `rope_scaling` were of full
    attention, and `rope_local_base_freq` was all that a window's had.
    """
    given = reader.section("rope_parameters") or ConfigReader({}, reader.where)
    known = (FULL, SLIDING, *(UNREAD if {FULL, SLIDING} <= given.config.keys() else ()))
    for key in given.config:
        if key not in known:
            raise UnsupportedModelError(
                f"{reader.where}: rope_parameters has {shown(key)}; this family's has {FULL}, {SLIDING}"
            )
    ropes: dict[str, dict[str, Any]] = {}
    for kind, theta_key, theta in (
        (FULL, "rope_theta", 1e6),
        (SLIDING, "rope_local_base_freq", DEFAULT_THETA),
    ):
        own = given.section(kind)
        ropes[kind] = {"rope_theta": reader.number(theta_key, theta), **(own.config if own else {})}
    scaling = reader.section("rope_scaling")
    ropes[FULL] |= scaling.config if scaling else {}
    rest = {key: value for key, value in reader.config.items() if key not in ROPE_KEYS}
    full, sliding = (
        ConfigReader({**rest, "rope_parameters": ropes[kind]}, reader.where) for kind in (FULL, SLIDING)
    )
    return full, sliding
