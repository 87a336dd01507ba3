"""What the benchmarks say of the machine they ran on."""

import os
import platform
import time
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """Its processor, and how much of it this process may use."""
    cpu = next((x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")), ":")
    return {
        "cpu": cpu.split(":", 1)[1].strip(),
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
    }


def busy_between() -> float:
    """Waits until pools of threads that spin for a while sleep, then returns the share of the processors'
    time that anything takes: another process, or a runtime that spins while idle."""
    time.sleep(0.2)
    before = [int(x) for x in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    time.sleep(0.3)
    after = [int(x) for x in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    spent = [y - x for x, y in zip(before, after, strict=True)]
    return 1 - (spent[3] + spent[4]) / max(1, sum(spent))


def compiled() -> dict[str, str]:
    """This environment, in which Python keeps what it compiles, as it does where packages are installed."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
