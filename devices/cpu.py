"""The CPU's name, instruction sets and caches: from the C++ extension, else from /proc and /sys."""

from pathlib import Path
from typing import Any, cast

from ..records import dataclass

_ROOT = Path("/")

# /proc/cpuinfo's flags under the extension's names, in its order. Linux lists a flag only where it saves the
# registers, so no further check is needed.
_X86_FLAGS = {
    "sse4_2": "sse4.2",
    "avx": "avx",
    "avx2": "avx2",
    "fma": "fma",
    "f16c": "f16c",
    "avx_vnni": "avx_vnni",
    "avx512f": "avx512f",
    "avx512bw": "avx512bw",
    "avx512cd": "avx512cd",
    "avx512dq": "avx512dq",
    "avx512vl": "avx512vl",
    "avx512_vnni": "avx512_vnni",
    "avx512_bf16": "avx512_bf16",
    "avx512_fp16": "avx512_fp16",
    "amx_tile": "amx_tile",
    "amx_int8": "amx_int8",
    "amx_bf16": "amx_bf16",
}
_ARM_FLAGS = {
    "asimd": "neon",
    "asimdhp": "fp16",
    "asimddp": "dotprod",
    "i8mm": "i8mm",
    "bf16": "bf16",
    "sve": "sve",
    "sve2": "sve2",
}


@dataclass(frozen=True)
class CpuCache:
    """One cache as one core sees it."""

    level: int
    type: str  # "data", "instruction" or "unified"
    bytes: int
    line_bytes: int
    shared_by: int  # logical CPUs that share one instance


@dataclass(frozen=True)
class Cpu:
    """None is what can't be read."""

    brand: str | None
    isa: tuple[str, ...] | None
    caches: tuple[CpuCache, ...] | None
    kernels: bool


def read_cpu(root: Path = _ROOT, notes: list[str] | None = None) -> Cpu:
    """This CPU. What can't be read is None, with a line in `notes`."""
    notes = [] if notes is None else notes
    info = _from_kernels() if root == _ROOT else None
    brand, isa, caches = _from_proc(root)
    if info is not None:
        brand = info["brand"] or brand
        isa = tuple(info["isa"]) or isa
        caches = tuple(CpuCache(**cache) for cache in info["caches"]) or caches
    else:
        notes.append("C++ kernels: not installed; instruction sets are what /proc/cpuinfo says")
    for what, value in (("CPU name", brand), ("instruction sets", isa), ("caches", caches)):
        if value is None:
            notes.append(f"{what}: can't be read on this system")
    return Cpu(brand, isa, caches, info is not None)


def _from_kernels() -> dict[str, Any] | None:
    try:
        from .. import _kernels
    except ImportError:
        return None
    return cast(dict[str, Any], _kernels.cpu_info())


def _from_proc(root: Path) -> tuple[str | None, tuple[str, ...] | None, tuple[CpuCache, ...] | None]:
    brand, flags = None, None
    for line in _read(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        key = key.strip()
        if key in ("model name", "Model") and brand is None:
            brand = " ".join(value.split()) or None
        elif key in ("flags", "Features") and flags is None:
            flags = set(value.split())
    isa = None
    if flags is not None:
        isa = tuple(name for flag, name in (_X86_FLAGS | _ARM_FLAGS).items() if flag in flags)
    return brand, isa, _sys_caches(root / "sys/devices/system/cpu/cpu0/cache") or None


def _sys_caches(folder: Path) -> tuple[CpuCache, ...]:
    caches = []
    for index in range(16):
        entry = folder / f"index{index}"
        level, size = _read(entry / "level").strip(), _read(entry / "size").strip()
        if not level.isdigit() or not size.removesuffix("K").isdigit():
            continue
        line, shared = _read(entry / "coherency_line_size").strip(), _read(entry / "shared_cpu_map")
        caches.append(
            CpuCache(
                level=int(level),
                type=_read(entry / "type").strip().lower(),
                bytes=int(size.removesuffix("K")) * (1024 if size.endswith("K") else 1),
                line_bytes=int(line) if line.isdigit() else 0,
                shared_by=_bits(shared),
            )
        )
    return tuple(caches)


def _bits(mask: str) -> int:
    """CPUs in a mask such as "00000000,0000000f"."""
    try:
        return int(mask.replace(",", "").strip() or "0", 16).bit_count()
    except ValueError:
        return 0


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
