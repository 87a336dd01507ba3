"""What machine is this, and what fits?"""

from .probe import Machine, probe
from .profile import DeviceProfile, KvDtype, Provider, load_profile
from .report import describe, describe_profile, machine_json, profile_json
from .resolve import list_profiles, resolve_device
from .sizes import format_bytes, parse_bytes, parse_memory_budget

__all__ = [
    "DeviceProfile",
    "KvDtype",
    "Machine",
    "Provider",
    "describe",
    "describe_profile",
    "format_bytes",
    "list_profiles",
    "load_profile",
    "machine_json",
    "parse_bytes",
    "parse_memory_budget",
    "probe",
    "profile_json",
    "resolve_device",
]
