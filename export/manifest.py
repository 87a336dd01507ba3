"""`nybble.json`: what an artifact is made of and where it came from."""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path, PurePosixPath
from typing import Any, Literal, get_args

from ..errors import ModelFormatError, NybbleError, SettingError
from ..models.config_reader import ConfigReader, parse_json_object, read_bounded, shown
from ..quant.recipe import Recipe
from ..records import dataclass

MANIFEST_NAME = "nybble.json"
FORMAT_VERSION = 1
# A manifest names some thousands of layers and files; anything far larger is not one.
MAX_MANIFEST_BYTES = 64 << 20

Checkpoint = Literal["gptq", "bnb"]  # the half that is a Hugging Face checkpoint, one of the two
Format = Literal[Checkpoint, "onnx"]
FORMATS: tuple[Format, ...] = get_args(Format)
# Whose graphs the ONNX half has: `OrtExecutor`'s, onnxruntime-genai's, or both.
OnnxContract = Literal["paged", "genai", "both"]
ONNX_CONTRACTS: tuple[OnnxContract, ...] = get_args(OnnxContract)


def checkpoint_of(recipe: Recipe) -> Checkpoint:
    """The kind of checkpoint that a recipe's weights are written as."""
    return "bnb" if recipe.is_bnb else "gptq"


@dataclass(frozen=True)
class FileEntry:
    """One file: bytes, SHA-256 in hexadecimal, and the half it belongs to (None: the artifact's)."""

    size: int
    sha256: str
    half: Format | None = None


@dataclass(frozen=True)
class Manifest:
    """`files` maps a path relative to the artifact, with `/`, to its entry; `nybble.json` is not among them.
    `layer_errors` maps a linear layer's tensor name to its relative error. `starved_experts` maps a layer's
    number to how many experts too few tokens of calibration text reached, where there are any. `refused_by`
    maps the name of a loader that is known not to load the checkpoint half to the reason."""

    source_origin: str
    source_digest: str
    recipe: Recipe
    formats: tuple[Format, ...]
    files: Mapping[str, FileEntry]
    created_with: Mapping[str, str] = field(default_factory=dict)  # program or library to version
    layer_errors: Mapping[str, float] = field(default_factory=dict)
    starved_experts: Mapping[str, int] = field(default_factory=dict)
    calibration_digest: str | None = None
    quality: Mapping[str, Any] | None = None
    refused_by: Mapping[str, str] = field(default_factory=dict)
    onnx_contract: OnnxContract = "paged"
    format_version: int = FORMAT_VERSION

    def to_bytes(self) -> bytes:
        """The file's content; the same manifest gives the same bytes."""
        data = {
            "format_version": self.format_version,
            "created_with": dict(self.created_with),
            "source": {"origin": self.source_origin, "digest": self.source_digest},
            "recipe": self.recipe.to_json(),
            "calibration_digest": self.calibration_digest,
            "formats": list(self.formats),
            "onnx_contract": self.onnx_contract if "onnx" in self.formats else None,
            "refused_by": dict(self.refused_by),
            "quality": None if self.quality is None else dict(self.quality),
            "layer_errors": dict(self.layer_errors),
            **({"starved_experts": dict(self.starved_experts)} if self.starved_experts else {}),
            "files": {
                path: {"size": e.size, "sha256": e.sha256, "half": e.half}
                for path, e in sorted(self.files.items())
            },
        }
        return (json.dumps(data, indent=1, allow_nan=False) + "\n").encode()

    @classmethod
    def from_bytes(cls, content: bytes, where: str) -> "Manifest":
        """Parses and checks a manifest; `where` names it in messages. Raises `ModelFormatError`: not JSON, a
        key missing or of the wrong kind, a path that leaves the folder, or a newer format version."""
        reader = ConfigReader(parse_json_object(content, where), where)
        version = reader.integer("format_version")
        if version > FORMAT_VERSION:
            raise ModelFormatError(
                f"{where}: its format version is {version}, written by a newer Nybble; "
                f"this one reads up to {FORMAT_VERSION}: upgrade nybble"
            )
        source = ConfigReader(_object(reader, "source"), where, "source.")
        try:
            recipe = Recipe.from_manifest(_object(reader, "recipe"))
        except (SettingError, TypeError) as error:
            raise ModelFormatError(f"{where}: recipe: {error}") from error
        has_calibration = reader.has("calibration_digest")
        return cls(
            source_origin=source.string("origin"),
            source_digest=source.string("digest"),
            recipe=recipe,
            formats=_formats(reader),
            files=_files(reader),
            created_with=_mapping(reader, "created_with", str, "a string"),
            layer_errors=_mapping(reader, "layer_errors", (int, float), "a finite number"),
            starved_experts=_mapping(reader, "starved_experts", int, "a number of experts")
            if reader.has("starved_experts")
            else {},
            calibration_digest=reader.string("calibration_digest") if has_calibration else None,
            quality=_object(reader, "quality") if reader.has("quality") else None,
            refused_by=_mapping(reader, "refused_by", str, "a string"),
            onnx_contract=_onnx_contract(reader),
            format_version=version,
        )

    def half_files(self, half: Format | None) -> dict[str, FileEntry]:
        """The files of one half, or with None those that belong to neither."""
        return {path: entry for path, entry in self.files.items() if entry.half == half}


def read_manifest(folder: Path) -> tuple[Manifest, str]:
    """The folder's manifest and the artifact's digest, the SHA-256 of `nybble.json`. Raises
    `ModelFormatError`."""
    path = folder / MANIFEST_NAME
    content = read_bounded(path, str(path), MAX_MANIFEST_BYTES)
    return Manifest.from_bytes(content, str(path)), hashlib.sha256(content).hexdigest()


def check_file_name(path: str, where: str, error: type[NybbleError] = ModelFormatError) -> None:
    """Raises `error` unless `path` is relative, in normal form, stays inside the artifact's folder, and is
    not the manifest's own."""
    parts = PurePosixPath(path).parts
    bad = not path or "\\" in path or not path.isprintable() or path.startswith("/") or ".." in parts
    if bad or "/".join(parts) != path or path == MANIFEST_NAME:
        raise error(f"{where}: {shown(path)} is not a name for a file inside the artifact")


def _object(reader: ConfigReader, key: str) -> dict[str, Any]:
    value = reader.config.get(key)
    if not isinstance(value, dict):
        raise reader.error(key, value, "an object")
    return value


def _mapping(reader: ConfigReader, key: str, kind: Any, expected: str) -> dict[str, Any]:
    values = _object(reader, key)
    for name, value in values.items():
        bad = not isinstance(value, kind) or isinstance(value, bool)
        # Compared, not converted: an integer in JSON may be too long for a float.
        if bad or (isinstance(value, float) and not math.isfinite(value)):
            raise reader.error(f"{key}[{shown(name)}]", value, expected)
    return values


def _formats(reader: ConfigReader) -> tuple[Format, ...]:
    names = reader.config.get("formats")
    found = [name for name in FORMATS if isinstance(names, list) and name in names]
    if not found or found != names or {"gptq", "bnb"} <= set(found):
        raise reader.error("formats", names, '["gptq"] or ["bnb"], ["onnx"] or both')
    return tuple(found)


def _onnx_contract(reader: ConfigReader) -> OnnxContract:
    """A manifest from before there were two has none."""
    found = reader.string("onnx_contract") if reader.has("onnx_contract") else "paged"
    if found not in ONNX_CONTRACTS:
        raise reader.error("onnx_contract", found, ", ".join(ONNX_CONTRACTS))
    return ONNX_CONTRACTS[ONNX_CONTRACTS.index(found)]


def _files(reader: ConfigReader) -> dict[str, FileEntry]:
    files = {}
    for path, data in _object(reader, "files").items():
        check_file_name(path, f"{reader.where}: files")
        prefix = f"files[{shown(path)}]"
        if not isinstance(data, dict):
            raise reader.error(prefix, data, "an object")
        entry = ConfigReader(data, reader.where, f"{prefix}.")
        size, digest = entry.integer("size", low=0, high=2**63 - 1), entry.string("sha256")
        if not re.fullmatch("[0-9a-f]{64}", digest):
            raise entry.error("sha256", digest, "64 hexadecimal digits")
        half = entry.string("half") if entry.has("half") else None
        if half is not None and half not in FORMATS:
            raise entry.error("half", half, "gptq, bnb, onnx or null")
        files[path] = FileEntry(size, digest, half)
    return files
