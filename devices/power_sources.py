"""Where a system tells what it draws: Intel's and AMD's RAPL counters, the rails of a Jetson, a board's own
meters (hwmon), NVIDIA's driver.

Files and units are those of https://docs.kernel.org/power/powercap/powercap.html and
https://docs.kernel.org/hwmon/sysfs-interface.html.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

from ..records import dataclass
from .gpu import Nvml, NvmlError

# Meters of parts that a model on the CPU does not use, or that count what others count already.
_NOT_OURS = ("amdgpu", "radeon", "nouveau", "i915", "xe", "BAT", "AC", "ucsi", "hidpp")
_ENERGY_RANGE = "max_energy_range_uj"


@dataclass(frozen=True)
class EnergyCounter:
    """What has been drawn since some time in the past."""

    name: str
    joules: Callable[[], float]
    range: float | None = None  # joules, at which it starts again from 0


@dataclass(frozen=True)
class PowerGauge:
    """What is drawn now."""

    name: str
    watts: Callable[[], float]


Source = EnergyCounter | PowerGauge


def find_sources(root: Path = Path("/")) -> tuple[list[Source], list[str]]:
    """What can be read under `root` and doesn't count anything twice, the best kind that there is: RAPL's
    packages and memory; else a Jetson's rails; else the board's meters. Then notes about what is there and
    can't be read."""
    notes: list[str] = []
    for kind in (_rapl, _jetson_rails, _hwmon_meters):
        sources = [source for source in kind(root) if _readable(source, notes)]
        if sources:
            return sources, notes
    if not notes:
        notes.append("no RAPL, Jetson rails or power meters in /sys")
    return [], notes


def gpu_source(nvml: Nvml, index: int) -> Source:
    """A GPU's counter, or on older ones its gauge. Raises `NvmlError`."""
    name = f"nvml {nvml.gpu(index).name}"
    try:
        nvml.joules(index)
    except NvmlError:
        nvml.watts(index)
        return PowerGauge(name, lambda: nvml.watts(index))
    return EnergyCounter(name, lambda: nvml.joules(index))


def _rapl(root: Path) -> Iterator[Source]:
    """Zones are all listed flat; a package contains its cores, and "psys" the packages."""
    for zone in sorted((root / "sys/class/powercap").glob("intel-rapl:*")):
        name = _text(zone / "name")
        if not (name.startswith("package") or name == "dram"):
            continue
        limit = _text(zone / _ENERGY_RANGE)
        wrap = int(limit) / 1e6 if limit.isdigit() else None
        file = zone / "energy_uj"
        yield EnergyCounter(f"rapl {zone.name.removeprefix('intel-rapl:')} {name}", _reader(file, 1e-6), wrap)


def _jetson_rails(root: Path) -> Iterator[Source]:
    """An INA3221 measures volts and amperes of three rails. VDD_IN, where there is one, feeds all others."""
    rails: dict[str, Source] = {}
    for chip in _hwmon(root, lambda name: name == "ina3221"):
        for channel in (1, 2, 3):
            label = _text(chip / f"in{channel}_label")
            if label and label != "NC" and (chip / f"curr{channel}_input").exists():
                volts = _reader(chip / f"in{channel}_input", 1e-3)
                amperes = _reader(chip / f"curr{channel}_input", 1e-3)
                rails[label] = PowerGauge(f"rail {label}", _product(volts, amperes))
    if "VDD_IN" in rails:
        yield rails["VDD_IN"]
    else:
        yield from rails.values()


def _hwmon_meters(root: Path) -> Iterator[Source]:
    for chip in _hwmon(root, lambda name: name != "ina3221" and not name.startswith(_NOT_OURS)):
        name = _text(chip / "name")
        for number in range(1, 9):
            file = chip / f"power{number}_average"
            if not file.exists():
                file = chip / f"power{number}_input"
            if file.exists():
                label = _text(chip / f"power{number}_label") or f"power{number}"
                yield PowerGauge(f"hwmon {name} {label}", _reader(file, 1e-6))


def _hwmon(root: Path, wanted: Callable[[str], bool]) -> Iterator[Path]:
    for chip in sorted((root / "sys/class/hwmon").glob("hwmon*")):
        name = _text(chip / "name")
        if name and wanted(name):
            yield chip


def _readable(source: Source, notes: list[str]) -> bool:
    try:
        source.joules() if isinstance(source, EnergyCounter) else source.watts()
    except PermissionError:
        notes.append(f"{source.name} may be read by root only")
        return False
    except (OSError, ValueError) as error:
        notes.append(f"{source.name} can't be read: {getattr(error, 'strerror', None) or error}")
        return False
    return True


def _reader(file: Path, scale: float) -> Callable[[], float]:
    return lambda: int(file.read_text(encoding="ascii", errors="replace")) * scale


def _product(one: Callable[[], float], other: Callable[[], float]) -> Callable[[], float]:
    return lambda: one() * other()


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
