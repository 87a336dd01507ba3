"""What `measure_limits` found, kept in the user's cache folder, so that half a second is spent once."""

import hashlib
import json
import logging
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeGuard

from ..records import dataclass
from .bandwidth import ReadRate
from .kernels import MachineLimits, measure_limits
from .user_files import cache_folder, read_small, replace_text

log = logging.getLogger("nybble")

_READS = ("small_read", "large_read")


@dataclass(frozen=True)
class LimitsKey:
    """What a measurement holds for. Another CPU, quota, instruction set or number of threads is another."""

    cpu: str | None
    architecture: str
    cores: int  # usable
    isa: str
    threads: int

    @property
    def file(self) -> Path | None:
        """Where the measurement is kept; None without a home."""
        folder = cache_folder()
        text = json.dumps(asdict(self), sort_keys=True)
        name = f"limits-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
        return None if folder is None else folder / name


def load_limits(key: LimitsKey) -> MachineLimits | None:
    """The limits that were measured before. A file that is missing, damaged or of another key is none."""
    file = key.file
    if file is None:
        return None
    try:
        data = json.loads(read_small(file))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(data, dict) or {name: data.get(name) for name in asdict(key)} != asdict(key):
        return None
    small, large = (_read_rate(data.get(name)) for name in _READS)
    rate = data.get("integer_rate")
    if small is None or large is None or not _is_rate(rate):
        return None
    return MachineLimits(key.threads, key.isa, small, large, rate)


def measure_and_keep(key: LimitsKey, memory: int | None = None) -> MachineLimits:
    """Measures for about half a second, as `measure_limits` does and raising what it does. The better of this
    and what was kept is returned and kept, since other processes only ever make a measurement worse; where
    it can't be kept, a line in the log says so."""
    now, file = measure_limits(key.threads, key.isa, memory), key.file
    best = _better(load_limits(key) or now, now)
    if file is not None:
        try:
            replace_text(file, json.dumps(asdict(key) | asdict(best), indent=2) + "\n")
        except OSError as error:
            log.info("%s: measured limits cannot be kept: %s", file, error.strerror)
    return best


def _better(before: MachineLimits, now: MachineLimits) -> MachineLimits:
    """The better of each; what was read of a buffer of another size before is forgotten."""
    reads = {}
    for name in _READS:
        old, new = getattr(before, name), getattr(now, name)
        reads[name] = replace(new, rate=max(old.rate, new.rate)) if old.bytes == new.bytes else new
    return replace(now, **reads, integer_rate=max(before.integer_rate, now.integer_rate))


def _read_rate(value: object) -> ReadRate | None:
    if not isinstance(value, dict):
        return None
    size, rate = value.get("bytes"), value.get("rate")
    return ReadRate(size, rate) if isinstance(size, int) and size > 0 and _is_rate(rate) else None


def _is_rate(value: object) -> TypeGuard[float]:
    return isinstance(value, float) and 0 < value < math.inf
