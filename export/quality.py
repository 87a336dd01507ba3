"""Figures of a finished artifact, added to its manifest."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import OutputError
from .artifact import artifact_folder
from .atomic_file import new_file
from .manifest import MANIFEST_NAME, read_manifest


def write_quality(path: str | Path, figures: Mapping[str, Any]) -> None:
    """Puts figures, in values that JSON has, into the manifest's `quality`, in place of those of the same
    names. The manifest is replaced whole, and with it the artifact's digest. Raises `ModelFormatError` for
    what is no artifact, and `OutputError` where it cannot be written."""
    folder = artifact_folder(path)
    manifest, _ = read_manifest(folder)
    changed = replace(manifest, quality={**(manifest.quality or {}), **figures})
    try:
        with new_file(folder / MANIFEST_NAME) as output:
            output.write(changed.to_bytes())
    except OSError as error:
        raise OutputError(f"{folder / MANIFEST_NAME}: cannot be written: {error.strerror}") from error
