"""What machine is this, and what fits?"""

from .advice import Way, ways_to_fit
from .bandwidth import Bandwidth, ReadRate
from .budget import plan_within, smallest_plan
from .disk import DiskRate, disk_read_rate
from .gpu import Gpu
from .heat import read_heat, slowed
from .kernels import MachineLimits, choose_isa, kernel_sets, measure_limits
from .memory_plan import ExecutorKind, MemoryPlan, RunSettings
from .model_bytes import kv_bytes_per_token, weight_bytes
from .planner import check_fit, fit_sequences
from .plans import plan_memory
from .power import Energy, PowerMeter
from .prediction import Rates, Speeds, predict
from .probe import Machine, measure_on, measured, probe
from .process import give_back_memory, peak_resident_bytes, reset_peak_resident, resident_bytes
from .profile import DeviceProfile, KvDtype, Provider, Speculation, load_profile
from .report import describe, describe_disk, describe_profile, machine_json, profile_json
from .residency import ResidencyPlan
from .resolve import list_profiles, resolve_device
from .sharing import share_pages
from .shortage import describe_shortage
from .sizes import format_bytes, parse_bytes, parse_memory_budget
from .streaming import total_experts
from .tuned import save_tuned, with_tuned

__all__ = [
    "Bandwidth",
    "DeviceProfile",
    "DiskRate",
    "Energy",
    "ExecutorKind",
    "Gpu",
    "KvDtype",
    "Machine",
    "MachineLimits",
    "MemoryPlan",
    "PowerMeter",
    "Provider",
    "Rates",
    "ReadRate",
    "ResidencyPlan",
    "RunSettings",
    "Speculation",
    "Speeds",
    "Way",
    "check_fit",
    "choose_isa",
    "describe",
    "describe_disk",
    "describe_profile",
    "describe_shortage",
    "disk_read_rate",
    "fit_sequences",
    "format_bytes",
    "give_back_memory",
    "kernel_sets",
    "kv_bytes_per_token",
    "list_profiles",
    "load_profile",
    "machine_json",
    "measure_limits",
    "measure_on",
    "measured",
    "parse_bytes",
    "parse_memory_budget",
    "peak_resident_bytes",
    "plan_memory",
    "plan_within",
    "predict",
    "probe",
    "profile_json",
    "read_heat",
    "reset_peak_resident",
    "resident_bytes",
    "resolve_device",
    "save_tuned",
    "share_pages",
    "slowed",
    "smallest_plan",
    "total_experts",
    "ways_to_fit",
    "weight_bytes",
    "with_tuned",
]
