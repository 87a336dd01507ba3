"""What machine is this, and what fits?"""

from .probe import Machine, probe
from .profile import DeviceProfile, KvDtype, Provider, load_profile
from .resolve import list_profiles, resolve_device
from .sizes import format_bytes, parse_bytes, parse_memory_budget

__all__ = [
    "DeviceProfile",
    "KvDtype",
    "Machine",
    "Provider",
    "format_bytes",
    "list_profiles",
    "load_profile",
    "parse_bytes",
    "parse_memory_budget",
    "probe",
    "resolve_device",
]
