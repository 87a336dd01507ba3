"""A LoRA (https://arxiv.org/abs/2106.09685) in PEFT's format, merged into a model as its tensors are read."""

import hashlib
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelFormatError, UnsupportedModelError
from .adapter_config import AdapterConfig
from .config_reader import MAX_CONFIG_BYTES, parse_json_object, read_bounded, shown
from .safetensors_file import SafetensorsFile
from .source import ModelSource
from .spec import ModelSpec

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
PREFIX = "base_model.model."
KINDS = (".lora_A.weight", ".lora_B.weight")
BASE = ".base_layer.weight"  # PEFT saves what it adapts beside the adapter where that is the head
BLOCK_ROWS = 1024  # of a product that is added at once


class _Delta(NamedTuple):
    """What is added to a tensor of the checkpoint: scale * B A; and what it replaces first, if anything."""

    a: str
    b: str
    scale: float
    base: str | None


class AdaptedSource:
    """A `ModelSource`: another one's tensors W [out, in] with scale * B A added in float32, where the adapter
    has A [rank, in] and B [out, rank]. Config and tokenizer stay the model's. Closes both."""

    def __init__(self, source: ModelSource, folder: Path) -> None:
        """Opening checks the config, and that each of the adapter's tensors belongs to a linear layer of the
        model and has its shape. Raises `ModelFormatError` or `UnsupportedModelError`."""
        self._source, self._folder = source, folder
        if not os.path.isdir(folder):
            raise ModelFormatError(f"{folder}: no such folder; expected an adapter's")
        path = folder / CONFIG
        self._config_bytes = read_bounded(path, str(path), MAX_CONFIG_BYTES)
        adapter = AdapterConfig.from_json(parse_json_object(self._config_bytes, str(path)), str(path))
        if not os.path.exists(folder / WEIGHTS) and os.path.exists(folder / PICKLE):
            raise UnsupportedModelError(
                f"{folder}: has only {PICKLE}, a pickle, which could run code when loaded; save the adapter "
                "as safetensors"
            )
        self._file = SafetensorsFile(folder / WEIGHTS)
        try:
            self._deltas = self._checked(adapter)
        except BaseException:
            self._file.close()
            raise

    @property
    def spec(self) -> ModelSpec:
        return self._source.spec

    @property
    def config(self) -> dict[str, Any]:
        return self._source.config

    @property
    def generation_config(self) -> dict[str, Any]:
        return self._source.generation_config

    @property
    def tokenizer_files(self) -> Mapping[str, bytes]:
        return self._source.tokenizer_files

    @property
    def origin(self) -> str:
        """The model's, and the adapter's folder by its name."""
        return f"{self._source.origin} + {self._folder.resolve().name}"

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the model's digest and the content of the adapter's config and weights, hexadecimal."""
        whole = hashlib.sha256(f"{self._source.digest}\0{len(self._config_bytes)}\0".encode())
        whole.update(self._config_bytes)
        try:
            with open(self._file.path, "rb") as file:
                while chunk := file.read(1 << 20):
                    whole.update(chunk)
        except OSError as error:
            raise ModelFormatError(f"{self._file.path}: cannot be read: {error.strerror}") from error
        return whole.hexdigest()

    def tensor(self, name: str) -> NDArray[np.float32]:
        rows = self._rows.get(name)
        delta = None if rows is None else self._deltas.get(rows.name)
        if rows is None or delta is None:
            return self._source.tensor(name)
        if delta.base is None:
            values = self._source.tensor(name)
        else:
            values = self._file.float32(delta.base, (rows.begin, rows.end))
        a = self._file.float32(delta.a)
        for begin in range(0, len(values), BLOCK_ROWS):
            end = min(begin + BLOCK_ROWS, len(values))
            b = self._file.float32(delta.b, (rows.begin + begin, rows.begin + end))
            values[begin:end] += (b @ a) * np.float32(delta.scale)
        if not (np.isfinite(values.min()) and np.isfinite(values.max())):
            raise ModelFormatError(f"{self._file.where}: makes {shown(name)} NaN or infinite")
        return values

    def close(self) -> None:
        self._file.close()
        self._source.close()

    @cached_property
    def _rows(self) -> dict[str, Any]:
        return self.spec.stored_rows()

    def _checked(self, adapter: AdapterConfig) -> dict[str, _Delta]:
        """By the name of the checkpoint's tensor that is changed."""
        where, found = self._file.where, dict[str, dict[str, str]]()
        for key in self._file.tensors:
            kind = next((kind for kind in (*KINDS, BASE) if key.endswith(kind)), None)
            if kind is None or not key.startswith(PREFIX):
                raise UnsupportedModelError(
                    f"{where}: has a tensor {shown(key)}; supported are {PREFIX}MODULE{' and '.join(KINDS)}"
                )
            found.setdefault(key.removeprefix(PREFIX).removesuffix(kind), {})[kind] = key
        if not found:
            raise ModelFormatError(f"{where}: has no tensors, expected an adapter's")
        shapes = self._targets()
        deltas = {}
        for module, keys in found.items():
            shape = shapes.get(module + ".weight")
            if shape is None:
                raise UnsupportedModelError(
                    f"{where}: adapts {shown(module)}, which is no linear layer of this "
                    f"{self.spec.model_type} model"
                )
            rank = adapter.rank_of(module)
            expected_shapes = {KINDS[0]: [rank, shape[1]], KINDS[1]: [shape[0], rank], BASE: list(shape)}
            for kind, expected in expected_shapes.items():
                if kind not in keys and kind == BASE:
                    continue
                if kind not in keys:
                    raise ModelFormatError(f"{where}: {PREFIX}{module}{kind} is missing")
                info, what = self._file.tensors[keys[kind]], f"{where}: {module}{kind} is"
                if list(info.shape) != expected:
                    raise ModelFormatError(f"{what} {list(info.shape)}, expected {expected}")
                if info.dtype not in ("F32", "F16", "BF16"):
                    raise UnsupportedModelError(f"{what} {info.dtype}, expected F32, F16 or BF16")
            a, b = (keys[kind] for kind in KINDS)
            deltas[module + ".weight"] = _Delta(a, b, adapter.scale_of(module), keys.get(BASE))
        return deltas

    def _targets(self) -> dict[str, tuple[int, int]]:
        """The checkpoint's linear layers, and the head where it is not the embedding."""
        spec = self.spec
        linears = [x.linear for layer in range(spec.num_layers) for x in spec.stored_linears(layer)]
        shapes = {x.name: (x.out_features, x.in_features) for x in linears}
        if not spec.tied_embeddings:
            shapes[spec.head_name] = (spec.vocab_size, spec.hidden_size)
        return shapes
