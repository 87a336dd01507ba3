"""An artifact folder, opened without reading what is not needed."""

import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ModelFormatError, SettingError
from ..models.config import spec_from_config
from ..models.config_reader import read_bounded, read_json_object, regular_file_size, shown
from ..models.spec import ModelSpec
from ..records import dataclass
from .atomic import recover
from .manifest import FORMATS, MANIFEST_NAME, FileEntry, Format, Manifest, checkpoint_of, read_manifest

if TYPE_CHECKING:
    from .checkpoint_weights import CheckpointWeights
    from .weights import LogicalWeights

MAX_TOKENIZER_BYTES = 128 << 20
CONFIGS = ("config.json", "generation_config.json")
QUANTIZE_CONFIG = "quantize_config.json"
ONNX_FOLDER = "onnx"
CACHE_FOLDER = "cache"  # what executors keep beside the artifact's files; not part of it
PAGED_GRAPH, GENAI_GRAPH = f"{ONNX_FOLDER}/decoder.onnx", f"{ONNX_FOLDER}/genai.onnx"
GENAI_CONFIG = "genai_config.json"
# Of a half, but not what it is made of: where only these are left, it was deleted.
SETTINGS = (QUANTIZE_CONFIG, GENAI_CONFIG)


@dataclass(frozen=True, eq=False)
class Artifact:
    """An opened artifact folder. `formats` are the halves that are on the disk now, which may be fewer than
    `manifest.formats`: a half may be deleted. `digest` is the SHA-256 of `nybble.json`."""

    folder: Path
    manifest: Manifest
    digest: str
    formats: tuple[Format, ...]
    config: dict[str, Any]
    spec: ModelSpec

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """`generation_config.json`, parsed; empty where there is none."""
        path = self.folder / "generation_config.json"
        return read_json_object(path, str(path)) if path.exists() else {}

    @cached_property
    def tokenizer_files(self) -> dict[str, bytes]:
        """File name to content: everything of the artifact that is neither a config nor in a half. Raises
        `ModelFormatError`."""
        return {
            name: read_bounded(self.folder / name, str(self.folder / name), MAX_TOKENIZER_BYTES)
            for name in self.manifest.half_files(None)
            if name not in CONFIGS
        }

    @property
    def tokenizer_dir(self) -> Path:
        """The folder that holds `tokenizer.json`: the artifact's."""
        return self.folder

    @property
    def onnx_path(self) -> Path:
        """The decoder's graph, of the paged contract where there is one. Raises `ModelFormatError` where that
        half is not there."""
        self.chosen("onnx")
        return self.folder / (PAGED_GRAPH if self.has_paged_graph else GENAI_GRAPH)

    @property
    def has_paged_graph(self) -> bool:
        """Whether the ONNX half has a graph that `OrtExecutor` runs as it is."""
        return self.manifest.onnx_contract != "genai"

    def chosen(self, format: str = "auto", preferred: Format = "gptq") -> Format:
        """The half that `format` ("auto", "gptq", "bnb" or "onnx") means here; "auto" is `preferred` where
        that is on the disk, else the first that is. Raises `ModelFormatError` for one that is not there."""
        if format == "auto":
            format = preferred if preferred in self.formats else self.formats[0]
        if format not in FORMATS:
            raise SettingError(f"format is {format!r}; expected auto, {' or '.join(FORMATS)}")
        half = FORMATS[FORMATS.index(format)]
        if half not in self.formats:
            has = " and ".join(self.formats)
            raise ModelFormatError(f"{self.folder}: has no {half} half; it has {has}")
        return half

    def weights(self, format: str = "auto") -> "LogicalWeights":
        """The tensors of a half, read one at a time when asked for. Raises `ModelFormatError`."""
        if self.chosen(format) != "onnx":
            return self.checkpoint()
        from .onnx_reader import OnnxWeights

        return OnnxWeights(self.onnx_path)

    def checkpoint(self) -> "CheckpointWeights":
        """The tensors of the half that is a Hugging Face checkpoint; close it. Raises `ModelFormatError`."""
        if self.chosen(checkpoint_of(self.manifest.recipe)) == "bnb":
            from .bnb_reader import BnbWeights

            return BnbWeights(self.folder)
        from .gptq_reader import GptqWeights

        return GptqWeights(self.folder)


def open_artifact(path: str | Path, format: str = "auto") -> Artifact:
    """Opens an artifact folder: checks the manifest, the config, and the sizes of the files of the half that
    `format` names ("auto": of every half that is there). Contents are checked by `verify.verify_files`.

    If a process died while it replaced the artifact, the previous one is put back first. Raises
    `ModelFormatError`: no such folder, not an artifact, damaged, or written by a newer Nybble; the half is
    not there; a file's size differs.
    """
    folder = artifact_folder(path)
    manifest, digest = read_manifest(folder)
    formats = present_formats(folder, manifest)
    if not formats:
        raise ModelFormatError(
            f"{folder}: neither half is there; it was written with {' and '.join(manifest.formats)}"
        )
    config_path = folder / "config.json"
    if "config.json" not in manifest.files:
        raise ModelFormatError(f"{folder / MANIFEST_NAME}: files does not list config.json")
    config = read_json_object(config_path, str(config_path))
    spec = spec_from_config(config, str(config_path))
    artifact = Artifact(folder, manifest, digest, formats, config, spec)
    halves = formats if format == "auto" else (artifact.chosen(format),)
    for half in (None, *halves):
        for name, entry in manifest.half_files(half).items():
            check_size(folder, name, entry)
    return artifact


def artifact_folder(path: str | Path) -> Path:
    """`path` as a folder with a manifest, recovered if a process died while it replaced it. Raises
    `ModelFormatError`: no such folder, or not an artifact."""
    folder = Path(path)
    try:
        recover(Path(os.path.realpath(folder)))
        found = folder.exists()
    except (OSError, ValueError):  # a name that is too long, or has a NUL in it
        found = False
    if not found:
        name = str(path)
        raise ModelFormatError(f"{name if name.isprintable() else shown(name)}: no such folder")
    if not folder.is_dir():
        raise ModelFormatError(f"{path}: is a file; expected an artifact folder made by `nybble quantize`")
    if not (folder / MANIFEST_NAME).exists():
        raise ModelFormatError(
            f"{path}: is not an artifact, it has no {MANIFEST_NAME}; "
            f"make one with `nybble quantize {path} -o OUT`"
        )
    return folder


def present_formats(folder: Path, manifest: Manifest) -> tuple[Format, ...]:
    """The halves that are on the disk. One is absent when none of its tensors' files is there; one that lost
    only some of its files is present, and damaged."""
    return tuple(
        half
        for half in manifest.formats
        if any((folder / name).exists() for name in manifest.half_files(half) if name not in SETTINGS)
    )


def check_size(folder: Path, name: str, entry: FileEntry) -> None:
    """Raises `ModelFormatError` unless the file is there with the manifest's size."""
    path = folder / name
    if not path.exists():
        raise ModelFormatError(f"{path}: is missing; {MANIFEST_NAME} lists it")
    size = regular_file_size(path, str(path))
    if size != entry.size:
        raise ModelFormatError(f"{path}: has {size} bytes; {MANIFEST_NAME} says {entry.size}")
