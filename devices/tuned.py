"""What `nybble tune` found for one model on one CPU, kept as a profile in the user's config folder."""

import hashlib
import json
import logging
from dataclasses import replace
from pathlib import Path

from ..errors import OutputError, SettingError
from .probe import Machine
from .profile import DeviceProfile, parse_profile
from .profile_text import profile_toml
from .user_files import config_folder, read_small, replace_text

log = logging.getLogger("nybble")


def tuned_file(digest: str, machine: Machine) -> Path | None:
    """Where the profile of the model with that digest is, on this CPU with these cores and kernels; None
    without a home. What was found elsewhere has another name, and so is never used here."""
    folder = config_folder()
    if folder is None:
        return None
    key = [digest, machine.cpu_brand, machine.architecture, machine.kernel_isa, machine.usable_cores]
    return folder / "tuned" / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]}.toml"


def save_tuned(profile: DeviceProfile, digest: str, machine: Machine) -> Path:
    """Keeps a profile in place of an earlier one. Raises `OutputError`."""
    file = tuned_file(digest, machine)
    if file is None:
        raise OutputError("tuned settings cannot be kept: this user has no home folder")
    if profile.memory_bytes is None or profile.memory_budget is None:
        raise OutputError(
            "tuned settings cannot be kept: a profile needs the memory, which can't be read here"
        )
    try:
        replace_text(file, profile_toml(profile))
    except OSError as error:
        raise OutputError(f"{file}: tuned settings cannot be kept: {error.strerror}") from None
    return file


def with_tuned(profile: DeviceProfile, digest: str, machine: Machine) -> DeviceProfile:
    """`auto`'s profile with the threads, token budget, KV type and speculation that were found for the model,
    if there are any; memory stays what it is now. A line in the log says so, or that the file is no good."""
    file = tuned_file(digest, machine)
    if file is None:
        return profile
    try:
        found = parse_profile(read_small(file), file.stem, str(file))
    except FileNotFoundError:
        return profile
    except (OSError, ValueError, SettingError) as error:
        log.warning("%s: tuned settings are not used: %s", file, error)
        return profile
    log.info("%s: %s", file, found.description)
    return replace(
        profile,
        threads=min(found.threads, machine.usable_cores),
        token_budget=found.token_budget,
        kv_dtype=found.kv_dtype,
        speculation=found.speculation,
    )
