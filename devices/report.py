"""`nybble devices`: the probe's findings and a profile, as rows for people and as data for programs."""

import os
from dataclasses import asdict
from typing import Any

from .cpu import CpuCache
from .disk import DiskRate
from .gpu import Gpu
from .kernels import ISA_VARIABLE
from .probe import Machine
from .profile import DeviceProfile
from .sizes import format_bytes

_UNKNOWN = "can't be read here"


def describe(machine: Machine) -> list[tuple[str, str]]:
    """Rows of label and value, in the order to show them."""
    rows = [
        ("System", f"{machine.system} {machine.architecture}"),
        ("CPU", machine.cpu_brand or _UNKNOWN),
        ("Cores", _cores(machine)),
        (
            "Instruction sets",
            _UNKNOWN if machine.isa is None else ", ".join(machine.isa) or "none that kernels use",
        ),
        ("Caches", _UNKNOWN if not machine.caches else ", ".join(map(_cache, machine.caches))),
        ("Memory", _memory(machine)),
        ("C++ kernels", _kernels(machine)),
        ("Measured limits", _limits(machine)),
        ("ONNX Runtime", machine.onnxruntime or "not installed"),
    ]
    rows += [(f"GPU {number}", _gpu(gpu)) for number, gpu in enumerate(machine.gpus or ())]
    if machine.providers is not None:
        rows.append(("Execution providers", ", ".join(machine.providers)))
    rows += [("Note", note) for note in machine.notes]
    return rows


def describe_profile(profile: DeviceProfile) -> list[tuple[str, str]]:
    """Rows of label and value for one profile."""
    memory = "unknown" if profile.memory_bytes is None else format_bytes(profile.memory_bytes)
    budget = "no limit" if profile.memory_budget is None else format_bytes(profile.memory_budget)
    rate = "not measured" if profile.bandwidth is None else f"{profile.bandwidth / 1e9:.1f} GB/s"
    return [
        ("Profile", profile.name),
        ("Description", profile.description),
        ("Memory", f"{memory} ({profile.memory_kind})"),
        ("Memory budget", budget),
        ("Threads", str(profile.threads)),
        ("Bandwidth", rate),
        ("Execution providers", ", ".join(p.name for p in profile.providers)),
        ("Page size", f"{profile.page_size} tokens"),
        ("KV cache", profile.kv_dtype),
        ("Token budget", f"{profile.token_budget} tokens a step"),
        ("Context", f"{profile.context} tokens"),
    ]


def describe_disk(disk: DiskRate) -> tuple[str, str]:
    """A row of label and value for a measured disk."""
    how = "past the page cache" if disk.direct else "through the page cache, which may have helped"
    return ("Disk", f"{disk.bytes_per_second / 1e9:.2f} GB/s read of {disk.path} ({how})")


def machine_json(machine: Machine) -> dict[str, Any]:
    """`machine` as JSON's types, by its field names; sizes in bytes."""
    return {key: _plain(value) for key, value in asdict(machine).items()}


def profile_json(profile: DeviceProfile) -> dict[str, Any]:
    """`profile` as JSON's types, by its field names; sizes in bytes, rates in bytes per second."""
    data = {key: value for key, value in vars(profile).items() if key != "providers"}
    return data | {"providers": [{"name": p.name, "options": dict(p.options)} for p in profile.providers]}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value


def _cores(machine: Machine) -> str:
    text = f"{machine.usable_cores} usable"
    details = []
    if machine.logical_cores is not None:
        details.append(f"{machine.logical_cores} logical")
    if machine.physical_cores is not None:
        details.append(f"{machine.physical_cores} physical")
    if machine.cpu_quota is not None:
        details.append(f"a quota of {machine.cpu_quota:g}")
    return f"{text} ({', '.join(details)})" if details else text


def _kernels(machine: Machine) -> str:
    if machine.kernel_sets is None:
        return "not installed: models run on ONNX Runtime"
    if machine.kernel_isa is None:
        return f"{ISA_VARIABLE} names none of {', '.join(machine.kernel_sets)}"
    forced = f", forced by {ISA_VARIABLE}" if os.environ.get(ISA_VARIABLE) else ""
    return f"{machine.kernel_isa} (of {', '.join(machine.kernel_sets)}){forced}"


def _limits(machine: Machine) -> str:
    limits = machine.limits
    if limits is None:
        return "not measured"
    reads = [f"{read.rate / 1e9:.1f} GB/s of {format_bytes(read.bytes)}" for read in limits.reads]
    threads = f"{limits.threads} thread{'s' if limits.threads > 1 else ''}"
    dot = f"{limits.integer_rate / 1e9:,.0f} GOPS of the {limits.isa} dot product"
    return f"read {', '.join(reads)}; {dot} ({threads})"


def _gpu(gpu: Gpu) -> str:
    text = gpu.name
    if gpu.memory_total is not None and gpu.memory_free is not None:
        text += f", {format_bytes(gpu.memory_free)} free of {format_bytes(gpu.memory_total)}"
    return text if gpu.watts is None else f"{text}, {gpu.watts:.0f} W now"


def _cache(cache: CpuCache) -> str:
    letter = {"data": "d", "instruction": "i"}.get(cache.type, "")
    shared = f" shared by {cache.shared_by}" if cache.shared_by > 1 else ""
    size = f"{cache.bytes // 1024} KiB" if cache.bytes < 2**20 else f"{cache.bytes / 2**20:g} MiB"
    return f"L{cache.level}{letter} {size}{shared}"


def _memory(machine: Machine) -> str:
    if machine.usable_memory is None:
        return _UNKNOWN
    text = f"{format_bytes(machine.usable_memory)} usable now"
    details = []
    if machine.memory_total is not None:
        details.append(f"{format_bytes(machine.memory_total)} in all")
    if machine.memory_limit is not None:
        details.append(f"a limit of {format_bytes(machine.memory_limit)}")
    return f"{text} ({', '.join(details)})" if details else text
