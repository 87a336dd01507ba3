"""Reading JSON and configs without trusting them: bounded files, checked values, one-line errors."""

import json
import math
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import ModelFormatError, UnsupportedModelError

MAX_CONFIG_BYTES = 4 << 20
REQUIRED: Any = object()


def shown(value: object) -> str:
    """A value as it appears in a message: `repr`, on one line and short."""
    text = repr(value) if not isinstance(value, dict | list) else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def shown_names(names: Iterable[object]) -> str:
    """A file's own names as they appear in a message: the first five, each on one line and short."""
    listed = [shown(name) for name in names]
    return ", ".join(listed[:5] + ["..."] * (len(listed) > 5))


def regular_file_size(path: Path, where: str) -> int:
    """Bytes in a file that must exist and be a regular one (opening a pipe or device could hang)."""
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelFormatError(f"{where}: cannot be opened: {reason}") from error
    if not stat.S_ISREG(status.st_mode):
        raise ModelFormatError(f"{where}: not a regular file")
    return status.st_size


def read_bounded(path: Path, where: str, limit: int) -> bytes:
    """A whole file of at most `limit` bytes. Raises `ModelFormatError`."""
    size = regular_file_size(path, where)
    if size > limit:
        raise ModelFormatError(f"{where}: {size} bytes, expected at most {limit}")
    try:
        with open(path, "rb") as file:
            return file.read(limit)
    except OSError as error:
        raise ModelFormatError(f"{where}: cannot be read: {error.strerror}") from error


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"the name {shown(name)} appears twice")
        result[name] = value
    return result


def _no_constants(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def parse_json_object(content: bytes, where: str) -> dict[str, Any]:
    """UTF-8 JSON whose top level is an object, with no name twice in one object and no NaN. Raises
    `ModelFormatError`."""
    try:
        value = json.loads(
            content.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_constant=_no_constants
        )
    except UnicodeDecodeError as error:
        raise ModelFormatError(f"{where}: not UTF-8 (byte {error.start})") from error
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFormatError(f"{where}: a JSON {type(value).__name__}, expected an object")
    return value


def read_json_object(path: Path, where: str, limit: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """`parse_json_object` of a file of at most `limit` bytes."""
    return parse_json_object(read_bounded(path, where, limit), where)


class ConfigReader:
    """Checked access to a config's values. Every method takes a key and a default for when the key is
    absent (`REQUIRED` for none), and raises `ModelFormatError` naming the file and the key.

    A null is an error unless the method's `nullable` says that it means the default.
    """

    def __init__(self, config: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self.config = config
        self.where = where
        self.prefix = prefix

    def error(self, key: str, found: object, expected: str) -> ModelFormatError:
        return ModelFormatError(f"{self.where}: {self.prefix}{key} is {shown(found)}, expected {expected}")

    def unsupported(self, key: str, found: object, expected: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self.where}: {self.prefix}{key} is {shown(found)}; supported: {expected}"
        )

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self.config.get(key) is not None

    def _value(self, key: str, default: Any, nullable: bool) -> tuple[Any, bool]:
        """The value and whether it is the default (which is not checked)."""
        value = self.config.get(key, default)
        if value is None and nullable:
            value = default
        if value is REQUIRED:
            raise ModelFormatError(f"{self.where}: {self.prefix}{key} is missing")
        return value, key not in self.config or (nullable and self.config[key] is None)

    def integer(
        self, key: str, default: Any = REQUIRED, low: int = 1, high: int = 2**31 - 1, nullable: bool = False
    ) -> int:
        """An integer in low..high."""
        value, is_default = self._value(key, default, nullable)
        if is_default:
            return int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.error(key, value, f"an integer in {low}..{high}")
        return value

    def number(
        self,
        key: str,
        default: Any = REQUIRED,
        above: float = 0.0,
        high: float = 1e30,
        nullable: bool = False,
    ) -> float:
        """A finite number with above < value <= high."""
        value, is_default = self._value(key, default, nullable)
        if is_default:
            return float(value)
        valid = isinstance(value, int | float) and not isinstance(value, bool)
        # Compared before converting: an integer in JSON may be too long for a float.
        if not valid or (isinstance(value, float) and not math.isfinite(value)) or not above < value <= high:
            raise self.error(key, value, f"a number above {above:g} and at most {high:g}")
        return float(value)

    def flag(self, key: str, default: Any = REQUIRED) -> bool:
        """true or false."""
        value, _ = self._value(key, default, False)
        if not isinstance(value, bool):
            raise self.error(key, value, "true or false")
        return value

    def string(self, key: str, default: Any = REQUIRED) -> str:
        value, _ = self._value(key, default, False)
        if not isinstance(value, str):
            raise self.error(key, value, "a string")
        return value

    def strings(self, key: str, length: int) -> list[str]:
        """A list of `length` strings."""
        value, _ = self._value(key, REQUIRED, False)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(key, value, "a list of strings")
        if len(value) != length:
            raise self.error(key, f"{len(value)} entries", f"{length}, one a layer")
        return value

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        """A list of `length` finite numbers above zero."""
        value, _ = self._value(key, REQUIRED, False)
        if not isinstance(value, list) or len(value) != length:
            raise self.error(key, value, f"a list of {length} numbers")
        items = ConfigReader(
            {str(i): item for i, item in enumerate(value)}, self.where, f"{self.prefix}{key}."
        )
        return tuple(items.number(str(i)) for i in range(length))

    def section(self, key: str) -> "ConfigReader | None":
        """The object under a key; None when absent, null or empty."""
        value = self.config.get(key)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            raise self.error(key, value, "an object")
        return ConfigReader(value, self.where, f"{self.prefix}{key}.")
