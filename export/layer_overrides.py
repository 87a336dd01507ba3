"""GPTQModel's `dynamic`: settings of single layers, by patterns of their names
(https://github.com/ModelCloud/GPTQModel#dynamic-quantization-per-module-quantizeconfig-override)."""

import re
from collections.abc import Mapping
from typing import Any

from ..errors import ModelFormatError, UnsupportedModelError
from ..models.config_reader import shown
from ..records import dataclass

# A pattern comes from a file. Matching tries every way to share a name out among its repetitions: few of
# them, and none around another, keep that short for a name of some sixty characters.
MAX_PATTERN, MAX_REPETITIONS, MAX_OVERRIDES = 500, 3, 1000
_REPETITION = re.compile(r"(?<!\\)[*+{]")
_REPEATED_GROUP = re.compile(r"(?<!\\)\)[*+{?]")
_REFERENCE = re.compile(r"\\[1-9]|\(\?")


@dataclass(frozen=True)
class StoredFormat:
    """How one linear layer is stored; `group_size` -1 is one group a row."""

    bits: int
    group_size: int


@dataclass(frozen=True)
class LayerOverride:
    """Layers whose name, from its beginning, matches `pattern`: not quantized, or with the `bits` and
    `group_size` that are given."""

    pattern: str
    skipped: bool
    bits: int | None = None
    group_size: int | None = None

    @classmethod
    def of(cls, name: str, bits: int, group_size: int) -> "LayerOverride":
        """Of the one layer of that name."""
        return cls(f"^{re.escape(name)}$", False, bits, group_size)


def read_overrides(dynamic: object, where: str) -> tuple[LayerOverride, ...]:
    """Checks `dynamic`, an object from pattern to settings: `-:` before a pattern leaves layers as they are,
    `+:` or nothing gives them settings of their own. Raises `ModelFormatError`, and `UnsupportedModelError`
    for a pattern that might take for ever."""
    if not dynamic:
        return ()
    if not isinstance(dynamic, dict) or len(dynamic) > MAX_OVERRIDES:
        raise ModelFormatError(f"{where}: dynamic is {shown(dynamic)}; expected an object of patterns")
    return tuple(_override(key, value, where) for key, value in dynamic.items())


def format_of(name: str, default: StoredFormat, overrides: tuple[LayerOverride, ...]) -> StoredFormat | None:
    """How a layer is stored, None where it is not quantized. The first pattern that matches counts."""
    for override in overrides:
        if re.match(override.pattern, name):
            if override.skipped:
                return None
            return StoredFormat(
                default.bits if override.bits is None else override.bits,
                default.group_size if override.group_size is None else override.group_size,
            )
    return default


def _override(key: str, settings: object, where: str) -> LayerOverride:
    skipped, pattern = key.startswith("-:"), re.sub(r"^[+-]:", "", key)
    _check_pattern(pattern, where)
    if not isinstance(settings, dict):
        raise ModelFormatError(f"{where}: dynamic[{shown(key)}] is {shown(settings)}; expected an object")
    if skipped:
        return LayerOverride(pattern, True)
    return LayerOverride(
        pattern, False, _number(settings, "bits", where), _number(settings, "group_size", where)
    )


def _number(settings: Mapping[str, Any], name: str, where: str) -> int | None:
    value = settings.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelFormatError(f"{where}: dynamic: {name} is {shown(value)}; expected a whole number")
    return value


def _check_pattern(pattern: str, where: str) -> None:
    if (
        len(pattern) > MAX_PATTERN
        or len(_REPETITION.findall(pattern)) > MAX_REPETITIONS
        or _REPEATED_GROUP.search(pattern)
        or _REFERENCE.search(pattern)
    ):
        raise UnsupportedModelError(
            f"{where}: dynamic has the pattern {shown(pattern)}; supported are at most {MAX_REPETITIONS} "
            "repetitions, none of a group, and no references"
        )
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ModelFormatError(f"{where}: dynamic has the pattern {shown(pattern)}: {error}") from None
