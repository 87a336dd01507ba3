"""A Hugging Face folder: `config.json`, safetensors in one or many files, a tokenizer."""

import hashlib
import os
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelFormatError, UnsupportedModelError
from .config import spec_from_config
from .config_reader import read_bounded, read_json_object, regular_file_size, shown
from .safetensors_file import SafetensorsFile
from .spec import ModelSpec, StoredRows

MAX_INDEX_BYTES = 16 << 20
MAX_TOKENIZER_BYTES = 128 << 20
MAX_SHARDS = 1000
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
PLAIN_NAME = re.compile(r"[A-Za-z0-9_\-][A-Za-z0-9_.\-]*\.safetensors")
GENERATION_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")

# Computed buffers that older versions of transformers saved; the spec says the same.
IGNORED_TENSORS = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


class HfFolder:
    """A `ModelSource` over a folder. Opening checks config, headers, and every tensor's presence and shape;
    no tensor is read before it is asked for. Close it, or use it in a `with`."""

    def __init__(self, folder: Path, origin: str | None = None) -> None:
        """`origin` is what the manifest calls it; by default the folder's name.

        Raises `ModelFormatError` or `UnsupportedModelError`.
        """
        self._folder = folder
        self._origin = origin if origin is not None else folder.resolve().name
        if not os.path.isdir(folder):
            raise ModelFormatError(f"{folder}: not a folder")
        config_path = folder / "config.json"
        if not os.path.exists(config_path):
            raise ModelFormatError(f"{folder}: has no config.json, so it is not a Hugging Face model folder")
        self._config = read_json_object(config_path, str(config_path))
        if self._config.get("quantization_config"):
            raise UnsupportedModelError(
                f"{config_path}: has a quantization_config, so the weights are quantized already; "
                "give the original model, or run it as it is"
            )
        self._spec = spec_from_config(self._config, str(config_path))
        self._generation_config = read_generation_config(folder, self._config)
        regular_file_size(folder / "tokenizer.json", str(folder / "tokenizer.json"))
        self._shards: dict[str, SafetensorsFile] = {}
        try:
            self._shard_of = self._open_weights()
            self._check_tensors()
        except BaseException:
            self.close()
            raise

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def config(self) -> dict[str, Any]:
        """`config.json`, parsed."""
        return self._config

    @property
    def generation_config(self) -> dict[str, Any]:
        """`generation_config.json`, parsed, with the stop tokens of `config.json` where it has none."""
        return self._generation_config

    @cached_property
    def tokenizer_files(self) -> Mapping[str, bytes]:
        """`tokenizer.json`, and `tokenizer_config.json` and `chat_template.jinja` where they are. Raises
        `ModelFormatError`."""
        return read_tokenizer_files(self._folder)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over name, size and content of `config.json` and each weights file in the names' order,
        hexadecimal. Reads all of them, once."""
        whole = hashlib.sha256()
        for name in ["config.json", *sorted(self._shards)]:
            path = self._folder / name
            whole.update(f"{name}\0{regular_file_size(path, str(path))}\0".encode())
            try:
                with open(path, "rb") as file:
                    while chunk := file.read(1 << 20):
                        whole.update(chunk)
            except OSError as error:
                raise ModelFormatError(f"{path}: cannot be read: {error.strerror}") from error
        return whole.hexdigest()

    @property
    def origin(self) -> str:
        return self._origin

    def tensor(self, name: str) -> NDArray[np.float32]:
        """One of `spec.tensors()` as float32. Raises `ModelFormatError` for another name, or values that are
        not finite."""
        rows = self._rows.get(name)
        if rows is None:
            raise ModelFormatError(f"{self._folder}: the model has no tensor {shown(name)}")
        shard = self._shard_of[rows.name]
        values = self._shards[shard].float32(rows.name, (rows.begin, rows.end))
        # Both are NaN if one value is; unlike isfinite over the array, they take no memory.
        if not (np.isfinite(values.min()) and np.isfinite(values.max())):
            raise ModelFormatError(f"{self._folder / shard}: tensor {shown(name)} holds NaN or infinity")
        return values

    def close(self) -> None:
        for shard in self._shards.values():
            shard.close()

    def __enter__(self) -> "HfFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return self._spec.stored_tensors()

    @cached_property
    def _rows(self) -> dict[str, StoredRows]:
        return self._spec.stored_rows()

    def _open_weights(self) -> dict[str, str]:
        """Opens the files; tensor name to file name."""
        if os.path.exists(self._folder / SINGLE_FILE):
            return dict.fromkeys(self._open_shard(SINGLE_FILE).tensors, SINGLE_FILE)
        index_path = self._folder / INDEX_FILE
        if not os.path.exists(index_path):
            pickled = next((name for name in PICKLES if os.path.exists(self._folder / name)), None)
            if pickled is not None:
                raise UnsupportedModelError(
                    f"{self._folder}: has only {pickled}, a pickle, which could run code when loaded; "
                    "save the model as safetensors"
                )
            raise ModelFormatError(f"{self._folder}: has neither {SINGLE_FILE} nor {INDEX_FILE}")
        shard_of = checked_weight_map(
            read_json_object(index_path, str(index_path), MAX_INDEX_BYTES), index_path
        )
        for name in sorted(set(shard_of.values())):
            if not os.path.exists(self._folder / name):
                raise ModelFormatError(f"{self._folder / name}: is missing, but {INDEX_FILE} names it")
            self._open_shard(name)
        for tensor, name in shard_of.items():
            if tensor not in self._shards[name].tensors:
                raise ModelFormatError(
                    f"{self._folder / name}: tensor {shown(tensor)} is missing, but {INDEX_FILE} says it is "
                    "there"
                )
        return shard_of

    def _open_shard(self, name: str) -> SafetensorsFile:
        self._shards[name] = SafetensorsFile(self._folder / name)
        return self._shards[name]

    def _check_tensors(self) -> None:
        for name, shape in self._shapes.items():
            shard = self._shard_of.get(name)
            if shard is None:
                where = self._folder / (SINGLE_FILE if SINGLE_FILE in self._shards else INDEX_FILE)
                raise ModelFormatError(f"{where}: tensor {shown(name)} is missing, expected {list(shape)}")
            found = self._shards[shard].tensors[name]
            what = f"{self._folder / shard}: tensor {shown(name)} is"
            if found.shape != shape:
                raise ModelFormatError(f"{what} {list(found.shape)}, expected {list(shape)}")
            if found.dtype not in ("F32", "F16", "BF16"):
                raise UnsupportedModelError(f"{what} {found.dtype}, expected F32, F16 or BF16")
        for name, shard in self._shard_of.items():
            # A tied head may be stored again; anything else would take part in a computation we don't do.
            known = name in self._shapes or name == "lm_head.weight" or IGNORED_TENSORS.fullmatch(name)
            if not known:
                raise UnsupportedModelError(
                    f"{self._folder / shard}: has a tensor {shown(name)}, which this config's "
                    f"{self._spec.model_type} model does not use"
                )


def checked_weight_map(index: dict[str, Any], path: Path) -> dict[str, str]:
    """The map from tensor name to plain file name in a parsed index of shards; `path` names it in messages.
    Raises `ModelFormatError`."""
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFormatError(
            f"{path}: weight_map is {shown(weight_map)}, expected tensor names to file names"
        )
    for tensor, name in weight_map.items():
        # A name with a separator, or "..", could lead out of the folder.
        if not isinstance(name, str) or not PLAIN_NAME.fullmatch(name):
            raise ModelFormatError(
                f"{path}: weight_map gives {shown(name)} for {shown(tensor)}, expected the plain name of a "
                ".safetensors file"
            )
    if len(set(weight_map.values())) > MAX_SHARDS:
        raise ModelFormatError(f"{path}: names more than {MAX_SHARDS} files")
    return weight_map


def read_tokenizer_files(folder: Path) -> dict[str, bytes]:
    """`tokenizer.json`, and `tokenizer_config.json` and `chat_template.jinja` where they are. Raises
    `ModelFormatError`."""
    return {
        name: read_bounded(folder / name, str(folder / name), MAX_TOKENIZER_BYTES)
        for name in TOKENIZER_FILES
        if os.path.exists(folder / name)
    }


def read_generation_config(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """`generation_config.json`, parsed, with the stop tokens of the parsed `config.json` where it has none.
    Raises `ModelFormatError`."""
    path = folder / "generation_config.json"
    generation = read_json_object(path, str(path)) if os.path.exists(path) else {}
    for key in GENERATION_KEYS:
        if generation.get(key) is None and config.get(key) is not None:
            generation[key] = config[key]
    stops = generation.get("eos_token_id")
    listed = stops if isinstance(stops, list) else [] if stops is None else [stops]
    if not all(type(stop) is int and stop >= 0 for stop in listed):
        where = path if os.path.exists(path) else folder / "config.json"
        raise ModelFormatError(
            f"{where}: eos_token_id is {shown(stops)}, expected a token id or a list of them"
        )
    return generation
