"""`ModelSpec` as JSON, the way the ONNX half's metadata carries it."""

import itertools
import json
import math
import types
from dataclasses import MISSING, asdict, fields
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ..errors import ModelFormatError
from ..models.mixture import MAX_ALL_EXPERTS
from ..models.spec import MixtureSpec, ModelSpec, RopeSpec


def spec_to_json(spec: ModelSpec) -> str:
    """The spec's fields by name, nested as they are."""
    return json.dumps(asdict(spec), sort_keys=True)


def spec_from_json(text: str, where: str) -> ModelSpec:
    """The inverse. Raises `ModelFormatError` naming `where` for anything but a complete, consistent spec."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"{where}: the model's description is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ModelFormatError(f"{where}: the model's description is no JSON object")
    spec = ModelSpec(**_fields(ModelSpec, data, where))
    _check(spec, where)
    return spec


def _rope(data: Any, where: str) -> RopeSpec:
    if not isinstance(data, dict):
        raise ModelFormatError(f"{where}: the model's description has no rope")
    return RopeSpec(**_fields(RopeSpec, data, where))


def _mixture(data: Any, where: str) -> MixtureSpec:
    if not isinstance(data, dict):
        raise ModelFormatError(f"{where}: the model's description has no mixture of experts")
    return MixtureSpec(**_fields(MixtureSpec, data, where))


def _fields(
    cls: type[ModelSpec] | type[RopeSpec] | type[MixtureSpec], data: dict[str, Any], where: str
) -> dict[str, Any]:
    hints = get_type_hints(cls)
    # A graph from before a field was there has its default.
    needed = {field.name for field in fields(cls) if field.default is MISSING}
    odd = sorted((set(data) - set(hints)) | (needed - set(data)))
    if odd:
        raise ModelFormatError(f"{where}: the model's description has {odd[0]} missing or unknown")
    values: dict[str, Any] = {}
    for name, value in data.items():
        if name in ("rope", "window_rope") and (value is not None or name == "rope"):
            values[name] = _rope(value, where)
            continue
        if name == "mixture" and value is not None:
            values[name] = _mixture(value, where)
            continue
        value = tuple(value) if isinstance(value, list) else value
        if not _matches(value, hints[name]):
            raise ModelFormatError(f"{where}: {name} is {value!r}; expected {hints[name]}")
        values[name] = float(value) if isinstance(value, int) and hints[name] is float else value
    return values


def _matches(value: Any, hint: Any) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_matches(value, argument) for argument in arguments)
    if origin is Literal:
        return isinstance(value, str) and value in arguments
    if origin is tuple:
        return isinstance(value, tuple) and all(_matches(item, arguments[0]) for item in value)
    if hint is type(None):
        return value is None
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _check(spec: ModelSpec, where: str) -> None:
    def check(name: str, found: object, ok: bool, expected: str) -> None:
        if not ok:
            raise ModelFormatError(f"{where}: {name} is {found!r}; expected {expected}")

    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads",
             "head_dim", "max_position")  # fmt: skip
    for name in sizes:
        value = getattr(spec, name)
        check(name, value, 0 < value < 1 << 31, "a positive 32-bit size")
    check("num_heads", spec.num_heads, spec.num_heads % spec.num_kv_heads == 0, "a multiple of num_kv_heads")
    for rope in spec.ropes:
        rotary = rope.rotary_dim
        check("rotary_dim", rotary, 0 < rotary <= spec.head_dim and rotary % 2 == 0, "even, at most head_dim")
        check("theta", rope.theta, rope.theta > 0, "a positive number")
        factors = (rope.short_factor, rope.long_factor) if rope.scaling == "longrope" else ()
        for found in factors:
            expected = f"{rotary // 2} positive numbers"
            check("a factor list", found, len(found) == rotary // 2 and min(found) > 0, expected)
    windows = spec.sliding_windows
    check("sliding_windows", len(windows), len(windows) in (0, spec.num_layers), "one entry a layer")
    check("sliding_windows", windows, all(w is None or w > 0 for w in windows), "positive windows")
    if (mixture := spec.mixture) is not None:
        layers, experts = mixture.layers, mixture.num_experts
        ascending = all(a < b for a, b in itertools.pairwise(layers))
        check("layers", layers, ascending, "ascending layers")
        check("layers", layers, all(0 <= x < spec.num_layers for x in layers), "layers of the model")
        check("num_experts", experts, 0 < experts <= MAX_ALL_EXPERTS // max(1, len(layers)), "fewer experts")
        chosen = mixture.experts_per_token
        check("experts_per_token", chosen, 0 < chosen <= experts, f"1 to {experts}")
        for size in (mixture.intermediate_size, mixture.shared_intermediate_size or 1):
            check("intermediate_size", size, 0 < size < 1 << 31, "a positive 32-bit size")
