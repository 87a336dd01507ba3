"""What machine is this, and what fits?"""

from .memory_plan import ExecutorKind, MemoryPlan, RunSettings
from .model_bytes import kv_bytes_per_token, weight_bytes
from .planner import check_fit, fit_sequences, plan_memory
from .probe import Machine, probe
from .profile import DeviceProfile, KvDtype, Provider, load_profile
from .report import describe, describe_profile, machine_json, profile_json
from .resolve import list_profiles, resolve_device
from .sizes import format_bytes, parse_bytes, parse_memory_budget

__all__ = [
    "DeviceProfile",
    "ExecutorKind",
    "KvDtype",
    "Machine",
    "MemoryPlan",
    "Provider",
    "RunSettings",
    "check_fit",
    "describe",
    "describe_profile",
    "fit_sequences",
    "format_bytes",
    "kv_bytes_per_token",
    "list_profiles",
    "load_profile",
    "machine_json",
    "parse_bytes",
    "parse_memory_budget",
    "plan_memory",
    "probe",
    "profile_json",
    "resolve_device",
    "weight_bytes",
]
