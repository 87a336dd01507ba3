"""The user's own folders, where Nybble keeps what it measured, and small text files in them."""

import os
from pathlib import Path

_LARGEST = 64 * 1024


def cache_folder() -> Path | None:
    """`$XDG_CACHE_HOME/nybble`, by default `~/.cache/nybble`: what can be made again. None without a home."""
    return _folder("XDG_CACHE_HOME", "~/.cache")


def config_folder() -> Path | None:
    """`$XDG_CONFIG_HOME/nybble`, by default `~/.config/nybble`: settings. None without a home."""
    return _folder("XDG_CONFIG_HOME", "~/.config")


def _folder(variable: str, default: str) -> Path | None:
    base = os.environ.get(variable, "")
    base = base if os.path.isabs(base) else os.path.expanduser(default)
    return Path(base, "nybble") if os.path.isabs(base) else None


def read_small(file: Path) -> str:
    """The text of a file. Raises `OSError`, and `ValueError` for one that is not text or is too long to be
    one of these."""
    # Opening a pipe that someone put there must not wait for a writer.
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    with open(descriptor, "rb") as opened:
        data = opened.read(_LARGEST + 1)
    if len(data) > _LARGEST:
        raise ValueError(f"longer than {_LARGEST} bytes")
    return data.decode("utf-8")


def replace_text(file: Path, text: str) -> None:
    """Writes a file whole or not at all, in a folder that is made if need be. Of several writers the last
    one's stays. Raises `OSError`."""
    import tempfile  # brings in much that running does not need

    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    try:
        with open(descriptor, "w", encoding="utf-8") as output:
            output.write(text)
            output.flush()
            os.fsync(output.fileno())
        os.replace(temporary, file)
    except BaseException:
        os.unlink(temporary)
        raise
