"""What this machine is, and how much of it this process may use."""

import os
import platform
from dataclasses import replace
from pathlib import Path

from ..errors import DoesNotFitError, NybbleError, SettingError
from ..records import dataclass
from .cgroup import read_cgroup_limits
from .cpu import CpuCache, read_cpu
from .gpu import Gpu, read_gpus
from .kernels import MachineLimits, choose_isa, kernel_sets, read_buffers
from .limits_cache import LimitsKey, load_limits, measure_and_keep
from .sizes import format_bytes

_ROOT = Path("/")


@dataclass(frozen=True)
class Machine:
    """What was found. None is what can't be read here, and `notes` says why."""

    system: str  # "Linux", "Darwin", "Windows"
    architecture: str  # "x86_64", "aarch64"
    cpu_brand: str | None
    isa: tuple[str, ...] | None  # instruction sets that may be used, by the kernels' names
    caches: tuple[CpuCache, ...] | None
    kernels: bool  # the C++ extension is installed
    kernel_sets: tuple[str, ...] | None  # instruction sets it has kernels for and this CPU runs, best first
    kernel_isa: str | None  # the one in use: what NYBBLE_ISA names, else the best
    logical_cores: int | None  # that this process may be scheduled on
    physical_cores: int | None  # of those: hyper-threads of one core count once
    cpu_quota: float | None  # CPUs' worth of time the control group allows; None: no quota
    usable_cores: int  # threads that can really run at once
    memory_total: int | None  # bytes
    memory_available: int | None  # bytes the system could give without swapping
    memory_limit: int | None  # bytes, the tightest control group's; None: no limit
    usable_memory: int | None  # bytes this process could still take
    limits: MachineLimits | None  # of all usable cores; None: not measured yet, or no kernels
    gpus: tuple[Gpu, ...] | None  # NVIDIA's; None when they weren't asked for or NVML isn't there
    providers: tuple[str, ...] | None  # ONNX Runtime's; None when it wasn't asked or isn't installed
    onnxruntime: str | None  # its version
    notes: tuple[str, ...]

    def limits_key(self, threads: int | None = None, isa: str | None = None) -> LimitsKey | None:
        """What limits are kept under, by default those of all usable cores and of the kernels in use; None
        without kernels."""
        isa = isa or self.kernel_isa
        if isa is None:
            return None
        cores = self.usable_cores
        return LimitsKey(self.cpu_brand, self.architecture, cores, isa, threads or cores)


def probe(root: Path = _ROOT, providers: bool = True) -> Machine:
    """Reads this machine, from the files under `root` where there are any. Works everywhere: what can't be
    read is None. Nothing is measured: `limits` are those that were kept. `providers` asks NVML for GPUs, and
    imports ONNX Runtime to ask what it offers (about 0.3 s and 40 MB)."""
    notes: list[str] = []
    cpu = read_cpu(root, notes)
    allowed = _allowed_cpus(root)
    logical = len(allowed) if allowed is not None else os.cpu_count()
    physical = _physical_cores(root, allowed)
    limits = read_cgroup_limits(root)
    if physical is None:
        notes.append("physical cores: no CPU topology in /sys; every logical core is counted as one")
    total, available = _memory(root)
    if available is None:
        notes.append("available memory: no MemAvailable in /proc/meminfo; the total stands in for it")
    address_space = _address_space_left(root)
    left = [n for n in (available or total, limits.memory_headroom, address_space) if n is not None]
    usable_memory = min(left, default=None)
    if usable_memory is None:
        notes.append("memory: can't be read on this system, so `auto` sets no budget; give memory_budget")
    gpus = read_gpus(notes) if providers else None
    offered, version = _providers(notes) if providers else (None, None)
    machine = Machine(
        system=platform.system(),
        architecture=platform.machine(),
        cpu_brand=cpu.brand,
        isa=cpu.isa,
        caches=cpu.caches,
        kernels=cpu.kernels,
        kernel_sets=kernel_sets() if cpu.kernels else None,
        kernel_isa=_kernel_isa(notes) if cpu.kernels else None,
        logical_cores=logical,
        physical_cores=physical,
        cpu_quota=limits.cpu_quota,
        usable_cores=_usable_cores(logical, physical, limits.cpu_quota),
        memory_total=total,
        memory_available=available,
        memory_limit=limits.memory_limit,
        usable_memory=usable_memory,
        limits=None,
        gpus=gpus,
        providers=offered,
        onnxruntime=version,
        notes=tuple(notes),
    )
    key = machine.limits_key()
    return machine if key is None else replace(machine, limits=load_limits(key))


def measured(machine: Machine, again: bool = False) -> Machine:
    """The machine with its limits: those that were kept, else, or with `again`, measured by `measure_on`.
    Where they can't be, and without kernels, it is as it was with a line in its notes."""
    if machine.limits is not None and not again:
        return machine
    key = machine.limits_key()
    if key is None:
        why = "no kernels here to measure with"
    else:
        try:
            return replace(machine, limits=measure_on(machine, key))
        except NybbleError as error:
            why = str(error)
    return replace(machine, notes=(*machine.notes, f"measured limits: {why}"))


def measure_on(machine: Machine, key: LimitsKey) -> MachineLimits:
    """As `measure_and_keep`, in no more than half of the usable memory: past a control group's limit the
    kernel ends the process, and says nothing. Raises `DoesNotFitError` where that is too little."""
    needed, usable = read_buffers()[0], machine.usable_memory
    if usable is None:
        return measure_and_keep(key)
    if needed > usable // 2:
        raise DoesNotFitError(
            f"they take {format_bytes(needed)}, over half of the {format_bytes(usable)} usable now"
        )
    return measure_and_keep(key, usable // 2)


def _kernel_isa(notes: list[str]) -> str | None:
    try:
        return choose_isa()
    except SettingError as error:
        notes.append(str(error))
        return None


def _usable_cores(logical: int | None, physical: int | None, quota: float | None) -> int:
    """A quota is rounded down: one thread more than it pays for stops all of them in every period. The
    second hyper-thread of a core doesn't help work that waits for memory."""
    counts = [physical or logical or 1]
    if quota is not None:
        counts.append(int(quota))
    return max(1, min(counts))


def _allowed_cpus(root: Path) -> tuple[int, ...] | None:
    """The CPUs in this process's affinity mask, which a cpuset narrows as well."""
    for line in _read(root / "proc/self/status").splitlines():
        key, _, value = line.partition(":")
        if key == "Cpus_allowed_list":
            cpus = _cpu_list(value.strip())
            return cpus or None
    if root == _ROOT and hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return None


def _cpu_list(text: str) -> tuple[int, ...]:
    """ "0-2,5" is (0, 1, 2, 5)."""
    cpus: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        last = last or first
        if not (first.isdigit() and last.isdigit()) or int(last) > 65535:
            return ()
        cpus.update(range(int(first), int(last) + 1))
    return tuple(sorted(cpus))


def _physical_cores(root: Path, allowed: tuple[int, ...] | None) -> int | None:
    """Distinct cores among the allowed CPUs: those that share a core list the same siblings."""
    if allowed is None:
        return None
    cores = set()
    for cpu in allowed:
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        siblings = _read(folder / "core_cpus_list") or _read(folder / "thread_siblings_list")
        if not siblings.strip():
            return None
        cores.add(siblings.strip())
    return len(cores)


def _memory(root: Path) -> tuple[int | None, int | None]:
    """Total and available bytes."""
    found = {}
    for line in _read(root / "proc/meminfo").splitlines():
        key, _, value = line.partition(":")
        fields = value.split()
        if fields and fields[0].isascii() and fields[0].isdigit():
            found[key] = int(fields[0]) * 1024
    total = found.get("MemTotal")
    if total is None and root == _ROOT and hasattr(os, "sysconf"):
        try:
            total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (ValueError, OSError):
            total = None
    return total, found.get("MemAvailable")


def _address_space_left(root: Path) -> int | None:
    """Bytes of address space a RLIMIT_AS leaves: no measure of memory, but an upper bound of it."""
    limit = None
    for line in _read(root / "proc/self/limits").splitlines():
        if line.startswith("Max address space"):
            soft = line.removeprefix("Max address space").split()[0]
            limit = int(soft) if soft.isascii() and soft.isdigit() else None
    if limit is None:
        return None
    pages = _read(root / "proc/self/statm").split()
    used = int(pages[0]) * os.sysconf("SC_PAGE_SIZE") if pages and pages[0].isdigit() else 0
    return max(0, limit - used)


def _providers(notes: list[str]) -> tuple[tuple[str, ...] | None, str | None]:
    """What ONNX Runtime offers, and its version."""
    try:
        import onnxruntime
    except ImportError:
        notes.append('execution providers: onnxruntime is not installed (pip install "nybble[onnx]")')
        return None, None
    return tuple(onnxruntime.get_available_providers()), str(onnxruntime.__version__)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
