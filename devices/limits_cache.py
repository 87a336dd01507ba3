"""What `measure_limits` found, kept in the user's cache folder, so that half a second is spent once."""

import hashlib
import json
import logging
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeGuard

from .kernels import MachineLimits, measure_limits
from .user_files import cache_folder, read_small, replace_text

log = logging.getLogger("nybble")

_RATES = ("read_bandwidth", "integer_rate")


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
    bandwidth, rate = (data.get(name) for name in _RATES)
    if not (_is_rate(bandwidth) and _is_rate(rate)):
        return None
    return MachineLimits(key.threads, key.isa, bandwidth, rate)


def measure_and_keep(key: LimitsKey) -> MachineLimits:
    """Measures for about half a second, as `measure_limits` does and raising what it does. The better of this
    and what was kept is returned and kept, since other processes only ever make a measurement worse; where
    it can't be kept, a line in the log says so."""
    now, before, file = measure_limits(key.threads, key.isa), load_limits(key), key.file
    rates = {name: max(getattr(each, name) for each in (now, before or now)) for name in _RATES}
    if file is not None:
        try:
            replace_text(file, json.dumps(asdict(key) | rates, indent=2) + "\n")
        except OSError as error:
            log.info("%s: measured limits cannot be kept: %s", file, error.strerror)
    return replace(now, **rates)


def _is_rate(value: object) -> TypeGuard[float]:
    return isinstance(value, float) and 0 < value < math.inf
