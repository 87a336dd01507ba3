"""From what the user names to the limits that hold on this machine."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from .probe import Machine, probe
from .profile import DeviceProfile, Provider, load_profile, profile_names

# `auto` leaves a share of what is free to everything else that runs.
_AUTO_SHARE = 0.8
_AUTO_CONTEXT = 8192
_CPU = Provider("CPUExecutionProvider")
_CUDA = Provider("CUDAExecutionProvider", {"arena_extend_strategy": "kSameAsRequested"})


def resolve_device(name_or_path: str = "auto", machine: Machine | None = None) -> DeviceProfile:
    """The limits to run under: "auto" from the probe, or a profile (by name or path to a .toml) narrowed to
    this machine. A profile is a limit: threads, and the host's memory budget, become the smaller of the
    profile's and what this process may use; nothing is ever raised.

    `load_profile` gives a profile as written, to plan for a device that isn't this one. Raises
    `SettingError`, which lists the names.
    """
    if name_or_path == "auto":
        return auto_profile(machine or probe(providers=False))
    profile = load_profile(name_or_path)
    return narrow(profile, machine or probe(providers=False))


def list_profiles() -> list[DeviceProfile]:
    """The profiles that come with Nybble, as written, sorted by name."""
    return [load_profile(name) for name in profile_names()]


def narrow(profile: DeviceProfile, machine: Machine) -> DeviceProfile:
    """The profile with threads and memory no larger than the machine's. Memory of a GPU's own stays."""
    threads = min(profile.threads, machine.usable_cores)
    if profile.memory_kind == "gpu" or machine.usable_memory is None:
        return replace(profile, threads=threads)
    known = [n for n in (profile.memory_bytes, machine.memory_total, machine.memory_limit) if n is not None]
    budgets = [n for n in (profile.memory_budget, machine.usable_memory) if n is not None]
    return replace(profile, threads=threads, memory_bytes=min(known), memory_budget=min(budgets))


def auto_profile(machine: Machine, cuda: Callable[[], bool] | None = None) -> DeviceProfile:
    """Limits from what the probe found. CUDA is chosen when ONNX Runtime's CUDA build is installed and there
    is an NVIDIA device; `cuda` answers that question."""
    if (cuda or _cuda_usable)():
        return DeviceProfile(
            name="auto",
            description="This machine, on its NVIDIA GPU",
            memory_bytes=None,
            memory_kind="gpu",
            memory_budget=None,
            threads=machine.usable_cores,
            bandwidth=None,
            providers=(_CUDA, _CPU),
            page_size=256,
            kv_dtype="f16",
            token_budget=2048,
            context=_AUTO_CONTEXT,
        )
    total = [n for n in (machine.memory_total, machine.memory_limit) if n is not None]
    limits = machine.limits
    return DeviceProfile(
        name="auto",
        description=f"This machine, on its CPU: {machine.cpu_brand or machine.architecture}",
        memory_bytes=min(total, default=None),
        memory_kind="host",
        memory_budget=None if machine.usable_memory is None else int(machine.usable_memory * _AUTO_SHARE),
        threads=machine.usable_cores,
        bandwidth=None if limits is None else limits.bandwidth.memory,
        cached_bytes=None if limits is None else int(limits.bandwidth.cached) or None,
        integer_rate=None if limits is None else limits.integer_rate,
        providers=(_CPU,),
        page_size=16,
        kv_dtype="f32",
        token_budget=512,
        context=_AUTO_CONTEXT,
    )


def _cuda_usable() -> bool:
    """Whether ONNX Runtime's CUDA package and a device are there, without importing ONNX Runtime."""
    if not (Path("/dev/nvidiactl").exists() or Path("/dev/nvhost-gpu").exists()):
        return False
    # Importing this, and looking through all that is installed, would be a noticeable part of a start.
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        distribution("onnxruntime-gpu")
    except PackageNotFoundError:
        return False
    return True
