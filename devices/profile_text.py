"""A `DeviceProfile` as the text of its file."""

from collections.abc import Mapping

from .profile import DeviceProfile

# From the file's unit to the profile's.
_UNITS = {"bandwidth": 1e9, "integer_rate": 1e9, "disk_bandwidth": 1e9}


def profile_toml(profile: DeviceProfile) -> str:
    """TOML that `parse_profile` reads as the same profile. Its memory must be known."""
    assert profile.memory_bytes is not None
    assert profile.memory_budget is not None
    lines = []
    for key, value in vars(profile).items():
        if key == "name" or value is None:
            continue
        if key == "providers":
            providers = [_provider(provider.name, provider.options) for provider in profile.providers]
            lines.append(f"providers = [{', '.join(providers)}]")
        elif isinstance(value, str):
            lines.append(f"{key} = {_quoted(value)}")
        else:
            lines.append(f"{key} = {value / _UNITS[key] if key in _UNITS else value!r}")
    return "\n".join(lines) + "\n"


def _provider(name: str, options: Mapping[str, str]) -> str:
    if not options:
        return _quoted(name)
    pairs = ", ".join(f"{_quoted(key)} = {_quoted(value)}" for key, value in options.items())
    return f"{{ name = {_quoted(name)}, options = {{ {pairs} }} }}"


def _quoted(text: str) -> str:
    """A TOML string of text without control characters, which a profile never has."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
