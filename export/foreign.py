"""`ForeignCheckpoint`: a quantized Hugging Face folder that somebody else made, opened to be run as it is."""

import hashlib
import os
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import ModelFormatError, UnsupportedModelError
from ..models.config_reader import MAX_CONFIG_BYTES, read_bounded, read_json_object, shown
from ..models.hf_folder import read_generation_config, read_tokenizer_files
from ..models.spec import ModelSpec
from ..quant.recipe import Recipe
from .awq_reader import AwqWeights
from .bnb_config import QUANT_METHOD, is_bnb
from .bnb_reader import BnbWeights
from .checkpoint_weights import CheckpointWeights
from .gptq_reader import GptqWeights

METHODS: dict[str, Callable[[Path], CheckpointWeights]] = {
    "gptq": GptqWeights, "awq": AwqWeights, QUANT_METHOD: BnbWeights
}  # fmt: skip


def is_foreign(folder: Path) -> bool:
    """Whether a folder is a quantized checkpoint of a method that some loader of Hugging Face's knows."""
    path = folder / "config.json"
    if not path.is_file():
        return False
    return (folder / "quantize_config.json").is_file() or bool(
        read_json_object(path, str(path)).get("quantization_config")
    )


class ForeignCheckpoint:
    """A folder of `quant_method` "gptq" (AutoGPTQ's, GPTQModel's), "awq" or "bitsandbytes". Opening checks
    configs, headers, and every tensor's presence and shape; tensors are read when asked for. Close it."""

    def __init__(self, folder: Path) -> None:
        """Raises `ModelFormatError` or `UnsupportedModelError`, naming the file, tensor or setting."""
        self.folder, path = folder, folder / "config.json"
        self.config: dict[str, Any] = read_json_object(path, str(path))
        settings = self.config.get("quantization_config") or {"quant_method": "gptq"}
        if not isinstance(settings, dict):
            raise ModelFormatError(f"{path}: quantization_config is {shown(settings)}; expected an object")
        self.method = QUANT_METHOD if is_bnb(settings) else settings.get("quant_method", "gptq")
        if not isinstance(self.method, str) or self.method not in METHODS:
            raise UnsupportedModelError(
                f"{path}: quant_method is {shown(self.method)}; supported are {', '.join(METHODS)}"
            )
        self.generation_config = read_generation_config(folder, self.config)
        self.weights = METHODS[self.method](folder)

    @property
    def spec(self) -> ModelSpec:
        return self.weights.spec

    @property
    def recipe(self) -> Recipe | None:
        """How all linear layers were quantized, as far as that says what they take; None where they differ,
        or are as no recipe makes them."""
        return self.weights.recipe

    @cached_property
    def tokenizer_files(self) -> dict[str, bytes]:
        """Raises `ModelFormatError`."""
        return read_tokenizer_files(self.folder)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the configs, and of each weights file's header, size and time of modification,
        hexadecimal: it tells one checkpoint from another without reading the weights."""
        digest = hashlib.sha256()
        for name in ("config.json", "quantize_config.json"):
            path = self.folder / name
            digest.update(read_bounded(path, str(path), MAX_CONFIG_BYTES) if path.exists() else b"")
        for path in self.weights.paths:
            status = os.stat(path)
            with open(path, "rb") as file:
                head = file.read(8)
                digest.update(head + file.read(int.from_bytes(head, "little")))
            digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}".encode())
        return digest.hexdigest()

    def close(self) -> None:
        self.weights.close()
