"""Models in the local Hugging Face cache, by their hub ids. Nothing is ever downloaded.

The layout is https://huggingface.co/docs/huggingface_hub/guides/manage-cache: `models--ORG--NAME` has a file
`refs/REVISION` with the name of a commit, and the files of a commit under `snapshots/COMMIT`.
"""

import os
import re
from pathlib import Path

from ..errors import ModelFormatError
from .config_reader import read_bounded, shown

ID = re.compile(r"(?P<name>\w[\w.\-]*(/\w[\w.\-]*)?)(@(?P<revision>\w[\w./\-]*))?", re.ASCII)
COMMIT = re.compile(r"[0-9A-Za-z_\-]{1,64}")
MAX_REF_BYTES = 100


def located(src: str | Path) -> str | Path:
    """A path as it is; where there is none, the folder in the cache of the hub id `ORG/NAME` or
    `ORG/NAME@REVISION`, or its GGUF file where that is all it has. What is neither, and no id with an
    organization, is returned as it is.

    Raises `ModelFormatError` for an id, or a revision of it, that is not in the cache.
    """
    text = str(src)
    found = ID.fullmatch(text)
    if os.path.lexists(src) or found is None or ".." in text or "--" in found["name"] or len(text) > 200:
        return src
    cache = cache_folder()
    name, revision = found["name"], found["revision"] or "main"
    repository = cache / f"models--{name.replace('/', '--')}"
    option = "" if found["revision"] is None else f" --revision {revision}"
    advice = f"nothing is downloaded here: `hf download {name}{option}` does"
    if not os.path.isdir(repository):
        if "/" not in name:
            return src
        raise ModelFormatError(
            f"{text!r}: no such file or folder, nor a model in the Hugging Face cache, {cache}; {advice}"
        )
    snapshot = repository / "snapshots" / _commit(repository, revision)
    if not os.path.isdir(snapshot):
        raise ModelFormatError(f"{text!r}: {repository} has no revision {shown(revision)}; {advice}")
    files = sorted(snapshot.glob("*.gguf"))
    if len(files) == 1 and not os.path.lexists(snapshot / "config.json"):
        return files[0]
    return snapshot


def cache_folder() -> Path:
    """Where Hugging Face's own library keeps what it downloads, by the same environment variables."""
    home = os.environ.get("HF_HOME")
    if home is None:
        home = os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    hub = os.path.join(home, "hub")
    for variable in ("HUGGINGFACE_HUB_CACHE", "HF_HUB_CACHE"):
        hub = os.environ.get(variable, hub)
    return Path(os.path.expandvars(os.path.expanduser(hub)))


def _commit(repository: Path, revision: str) -> str:
    """What a branch or tag points to; a revision without a file is a commit itself."""
    ref = repository / "refs" / revision
    if not os.path.isfile(ref):
        return revision
    commit = read_bounded(ref, str(ref), MAX_REF_BYTES).decode("utf-8", "replace").strip()
    if not COMMIT.fullmatch(commit):
        raise ModelFormatError(f"{ref}: holds {shown(commit)}, expected the name of a commit")
    return commit
