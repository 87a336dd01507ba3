"""Checked access to a GGUF file's metadata."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import ModelFormatError, UnsupportedModelError
from .gguf_file import StringArray


class Metadata:
    """Checked access to metadata: each method raises `ModelFormatError` naming the key and what was found."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def get(self, key: str, kind: type, default: Any, expected: str) -> Any:
        value = self.values.get(key, default)
        if value is not None and (
            not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)
        ):
            found = repr(value) if isinstance(value, str | int | float) else f"an array of {len(value)}"
            raise ModelFormatError(f"{self.where}: {key} is {found[:60]}; expected {expected}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value: str | None = self.get(key, str, default, "a string")
        if value is None:
            raise ModelFormatError(f"{self.where}: the metadata lacks {key}")
        return value

    def strings(self, key: str) -> list[str] | None:
        """An array of strings, None where there is none."""
        value: StringArray | None = self.get(key, StringArray, None, "an array of strings")
        return None if value is None else value.decoded()

    def flag(self, key: str, default: bool) -> bool:
        return bool(self.get(key, bool, default, "a boolean"))

    def integer(self, key: str, default: int | None = None, most: int = 1 << 31) -> int:
        """A number from 0 to `most`. An array (one number a layer) is accepted where all are equal."""
        value = self.values.get(key)
        if isinstance(value, np.ndarray) and value.size and value.dtype.kind in "iu":
            if (value != value[0]).any():
                raise UnsupportedModelError(f"{self.where}: {key} differs between layers")
            value = int(value[0])
        else:
            value = self.get(key, int, default, "a whole number")
        if value is None:
            raise ModelFormatError(f"{self.where}: the metadata lacks {key}")
        if not 0 <= value <= most:
            raise ModelFormatError(f"{self.where}: {key} is {value}; expected 0 to {most}")
        return int(value)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number. What was stored in 32 bits becomes the shortest decimal that rounds to it, which
        is the number the original config had."""
        value = self.values.get(key, default)
        if value is None:
            raise ModelFormatError(f"{self.where}: the metadata lacks {key}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ModelFormatError(f"{self.where}: {key} is {str(value)[:60]!r}; expected a finite number")
        with np.errstate(over="ignore"):
            single = np.float32(value)
        return float(str(single)) if float(single) == value else float(value)
