"""Whether the CPU was slowed down by heat or by its power supply.

Sources: https://docs.kernel.org/admin-guide/abi-testing.html (thermal_throttle, cpufreq), and the Raspberry
Pi's firmware, whose bits https://www.raspberrypi.com/documentation/computers/os.html#get_throttled explains.
"""

from pathlib import Path

from ..records import dataclass

_CPUS = "sys/devices/system/cpu"
_PI = "sys/devices/platform/soc/soc:firmware/get_throttled"
_PI_BITS = ("under-voltage", "capped frequency", "throttling", "soft temperature limit")
_PI_PAST = 16  # by how much bits that say "since the start" lie above those that say "now"
# A CPU with all cores at work stays under its highest clock; this far under it, something holds it back.
_LOW_CLOCK = 0.7


@dataclass(frozen=True)
class Heat:
    """What the system says at one moment; None is what it doesn't tell."""

    throttle_events: int | None  # of all cores and packages since the system started
    pi_bits: int | None
    clock: float | None  # hertz, the mean of the CPUs
    highest_clock: float | None  # hertz, that the hardware has
    allowed_clock: float | None  # hertz, that policy and thermal control leave


def read_heat(root: Path = Path("/")) -> Heat:
    """Reads it from the files under `root`."""
    cpus = [entry for entry in (root / _CPUS).glob("cpu[0-9]*") if entry.name[3:].isdigit()]
    events = [
        count
        for cpu in cpus
        for name in ("core_throttle_count", "package_throttle_count")
        if (count := _number(cpu / "thermal_throttle" / name)) is not None
    ]
    return Heat(
        sum(events) if events else None,
        _number(root / _PI, base=16),
        *(_mean_hertz(cpus, name) for name in ("scaling_cur_freq", "cpuinfo_max_freq", "scaling_max_freq")),
    )


def slowed(before: Heat, after: Heat) -> tuple[str, ...]:
    """What slowed the CPU down between two readings, of which the second was made while it was busy or just
    after; empty where nothing did, or nothing is told."""
    found = []
    if before.throttle_events is not None and after.throttle_events is not None:
        events = after.throttle_events - before.throttle_events
        if events > 0:
            found.append(f"the CPU was throttled by heat ({events} events)")
    if after.pi_bits is not None:
        begun = (after.pi_bits & ~(before.pi_bits or 0)) >> _PI_PAST
        reasons = [name for bit, name in enumerate(_PI_BITS) if (after.pi_bits | begun) >> bit & 1]
        found += [f"the firmware reports {', '.join(reasons)}"] if reasons else []
    highest = after.highest_clock
    if highest and after.allowed_clock is not None and after.allowed_clock < highest:
        found.append(f"the clock is limited to {_gigahertz(after.allowed_clock)} of {_gigahertz(highest)}")
    elif highest and after.clock is not None and after.clock < _LOW_CLOCK * highest:
        found.append(f"the clock was at {_gigahertz(after.clock)} of {_gigahertz(highest)}")
    return tuple(found)


def _mean_hertz(cpus: list[Path], name: str) -> float | None:
    found = [n for cpu in cpus if (n := _number(cpu / "cpufreq" / name)) is not None]
    return 1e3 * sum(found) / len(found) if found else None


def _gigahertz(hertz: float) -> str:
    return f"{hertz / 1e9:.2f} GHz"


def _number(file: Path, base: int = 10) -> int | None:
    try:
        return int(file.read_text(encoding="ascii", errors="replace"), base)
    except (OSError, ValueError):
        return None
