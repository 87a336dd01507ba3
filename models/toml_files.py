"""Settings in TOML files: those that come with a package by name, others by path."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SettingError

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

MAX_TOML_BYTES = 64 * 1024


def toml_names(folder: "Traversable") -> list[str]:
    """The names of a folder's TOML files, without the ending, sorted."""
    return sorted(x.name.removesuffix(".toml") for x in folder.iterdir() if x.name.endswith(".toml"))


def toml_path(name_or_path: str) -> Path | None:
    """The path that a text is which ends in `.toml` or holds a path separator; None for a name."""
    is_path = name_or_path.endswith(".toml") or "/" in name_or_path or "\\" in name_or_path
    return Path(name_or_path) if is_path else None


def read_toml(path: Path, where: str) -> str:
    """A file's text; `where` names it in messages. Raises `SettingError` for what cannot be read, is longer
    than `MAX_TOML_BYTES` or is not UTF-8."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TOML_BYTES + 1)
    except (OSError, ValueError) as error:  # the latter for a name that no file can have
        reason = error.strerror if isinstance(error, OSError) else error
        raise SettingError(f"{where}: can't be read: {reason}") from None
    if len(data) > MAX_TOML_BYTES:
        raise SettingError(f"{where}: longer than {MAX_TOML_BYTES} bytes; expected a few settings")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise SettingError(f"{where}: not UTF-8 at byte {error.start}") from None


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """The settings in a TOML text. Raises `SettingError`."""
    import tomllib

    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise SettingError(f"{where}: not TOML: {error}".replace("\n", " ")) from None
