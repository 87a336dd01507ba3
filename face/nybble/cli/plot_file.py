"""Where a command's plot goes."""

import tempfile
from pathlib import Path
from typing import Any

from ..errors import MissingDependencyError, OutputError, SettingError


def check_plot(target: Path) -> None:
    """Raises where no plot could be written to `target`: `MissingDependencyError`, `SettingError`,
    `OutputError`."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MissingDependencyError(
            'a plot needs matplotlib, which is not installed: pip install "nybble[bench]"'
        ) from None
    if target.suffix.lower() != ".png":
        raise SettingError(f"--plot is {target}; expected a file that ends in .png")
    if target.is_dir():
        raise OutputError(f"--plot is {target}, which is a folder; expected a file")
    try:
        with open(target, "ab") if target.exists() else tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as error:
        raise OutputError(f"--plot is {target}, which cannot be written: {error.strerror}") from None


def save_plot(figure: Any, target: Path) -> None:
    """Writes a matplotlib figure as a PNG. Raises `OutputError`."""
    try:
        figure.savefig(target, dpi=120, format="png")
    except OSError as error:
        raise OutputError(f"{target}: {error.strerror or error}") from error
