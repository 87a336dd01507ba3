"""What machine is this, and what fits?"""

from .advice import Way, ways_to_fit
from .budget import plan_within, smallest_plan
from .kernels import MachineLimits, choose_isa, kernel_sets, measure_limits
from .memory_plan import ExecutorKind, MemoryPlan, RunSettings
from .model_bytes import kv_bytes_per_token, weight_bytes
from .planner import check_fit, fit_sequences
from .plans import plan_memory
from .prediction import Rates, Speeds, predict
from .probe import Machine, probe
from .process import peak_resident_bytes
from .profile import DeviceProfile, KvDtype, Provider, load_profile
from .report import describe, describe_profile, machine_json, profile_json
from .residency import ResidencyPlan
from .resolve import list_profiles, resolve_device
from .sizes import format_bytes, parse_bytes, parse_memory_budget

__all__ = [
    "DeviceProfile",
    "ExecutorKind",
    "KvDtype",
    "Machine",
    "MachineLimits",
    "MemoryPlan",
    "Provider",
    "Rates",
    "ResidencyPlan",
    "RunSettings",
    "Speeds",
    "Way",
    "check_fit",
    "choose_isa",
    "describe",
    "describe_profile",
    "fit_sequences",
    "format_bytes",
    "kernel_sets",
    "kv_bytes_per_token",
    "list_profiles",
    "load_profile",
    "machine_json",
    "measure_limits",
    "parse_bytes",
    "parse_memory_budget",
    "peak_resident_bytes",
    "plan_memory",
    "plan_within",
    "predict",
    "probe",
    "profile_json",
    "resolve_device",
    "smallest_plan",
    "ways_to_fit",
    "weight_bytes",
]
