"""Amounts of memory, read from what people write and written the way they read."""

import re

from ..errors import SettingError

_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B)", re.IGNORECASE)
_SMALLEST_BUDGET = 2**20
_LARGEST = 2**63 - 1


def parse_bytes(value: object, name: str = "memory") -> int:
    """Bytes from an integer, or from text such as "600MB" (powers of 1000) or "1.5GiB" (powers of 1024).

    Raises `SettingError`, naming `name`.
    """
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _LARGEST:
        return value
    if isinstance(value, str):
        text = value.strip()
        if text.isascii() and text.isdigit() and len(text) < 20 and 0 < int(text) <= _LARGEST:
            return int(text)
        match = _SIZE.fullmatch(text)
        if match and len(text) < 40:
            size = float(match[1]) * _UNITS[match[2].upper()]
            if 1 <= size <= _LARGEST:
                return int(size)
    raise SettingError(f'{name} is {value!r}; expected bytes above 0, or a size such as "600MB" or "1.5GiB"')


def parse_memory_budget(value: object, of: int | None, name: str = "memory_budget") -> int:
    """The budget in bytes: an integer of bytes, a size ("600MB", "1.5GiB"), or a share of `of` bytes
    (0.5, "0.5" or "50%"; 1.0 is all of it). `of` None is an unknown amount, of which no share can be taken.

    Raises `SettingError`, naming `name`.
    """
    expected = 'expected bytes, a size such as "600MB" or "1.5GiB", or a share such as 0.5 or "50%"'
    share = _share(value)
    if share is not None:
        if not 0 < share <= 1:
            raise SettingError(f"{name} is {value!r}; {expected}")
        if of is None:
            raise SettingError(
                f"{name} is {value!r}, a share of an amount of memory that can't be read; give bytes"
            )
        size = int(of * share)
    else:
        try:
            size = parse_bytes(value, name)
        except SettingError:
            raise SettingError(f"{name} is {value!r}; {expected}") from None
    if size < _SMALLEST_BUDGET:
        raise SettingError(f"{name} is {value!r}, {size} bytes; no model runs in under 1 MiB; {expected}")
    return size


def _share(value: object) -> float | None:
    if isinstance(value, float):
        return value
    if isinstance(value, str):
        text = value.strip()
        if re.fullmatch(r"\d{1,3}(\.\d{1,6})?%", text):
            return float(text[:-1]) / 100
        if re.fullmatch(r"\d?\.\d{1,9}", text):
            return float(text)
    return None


def format_bytes(size: int) -> str:
    """A size for people, three figures in powers of 1000: "102 MB", "1.45 GB"."""
    amount, unit = float(size), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if amount < 999.5:
            break
        amount, unit = amount / 1000, larger
    if unit == "B":
        return f"{size} B"
    digits = 0 if amount >= 99.95 else 1 if amount >= 9.995 else 2
    return f"{amount:.{digits}f} {unit}"
