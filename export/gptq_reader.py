"""Reads a GPTQ checkpoint back as logical tensors: the artifact's half, and what GPTQModel or AutoGPTQ wrote
in the same layout."""

import weakref
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelFormatError, UnsupportedModelError
from ..models.config import spec_from_config
from ..models.config_reader import read_json_object, shown
from ..models.hf_folder import INDEX_FILE, MAX_INDEX_BYTES, SINGLE_FILE, checked_weight_map
from ..models.safetensors_file import SafetensorsFile, TensorInfo
from ..models.spec import LinearSpec, ModelSpec
from ..quant.packing import QuantizedTensor, from_gptq, gptq_zeros, quantize_head
from ..quant.packing_rows import ROW_STEP, MatrixKind, MatrixRows, all_in_the_middle
from .gptq import linear_layout
from .gptq_config import GptqConfig
from .weights import LogicalTensor

FLOATS = ("F16", "BF16", "F32")


class GptqWeights:
    """`LogicalWeights` over a folder. Opening checks the configs, the headers, and every tensor's presence,
    dtype and shape; tensors are read when asked for and not kept. Close it, or use it in a `with`.

    The embedding and the head come in the 8-bit form of `packing.quantize_head`.
    """

    def __init__(self, folder: Path) -> None:
        """Raises `ModelFormatError` or `UnsupportedModelError`, naming the file, tensor or setting."""
        self.folder = Path(folder)
        config_path = self.folder / "config.json"
        config = read_json_object(config_path, str(config_path))
        self.spec: ModelSpec = spec_from_config(config, str(config_path))
        self.gptq_config = read_gptq_config(self.folder, config)
        self._shards = open_shards(self.folder)
        # An executor that reads the weights once need not say when it is done.
        self._close = weakref.finalize(self, _close_all, list(self._shards.values()))
        try:
            self._check_tensors()
        except BaseException:
            self.close()
            raise

    def tensor(self, name: str) -> LogicalTensor:
        """One of `spec.tensors()`. Raises `ModelFormatError` for another name or damaged content."""
        matrix = self.matrix(name)
        return self._floats(name) if matrix is None else matrix.whole()

    def matrix(self, name: str) -> MatrixRows | None:
        """Raises as `tensor` does, and so do its parts."""
        if name not in self._shapes:
            raise ModelFormatError(f"{self.folder}: the model has no tensor {shown(name)}")
        if name in self._linears:
            return self._quantized(name)
        if name not in (self.spec.embedding_name, self.spec.head_name):
            return None

        def read(begin: int, end: int) -> QuantizedTensor:
            return quantize_head(self._floats(name, (begin, end)), name)

        return MatrixRows.of_head(self._shapes[name], read)

    def close(self) -> None:
        self._close()

    def __enter__(self) -> "GptqWeights":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return self.spec.tensors()

    @cached_property
    def _linears(self) -> dict[str, LinearSpec]:
        layers = range(self.spec.num_layers)
        return {linear.name: linear for layer in layers for linear in self.spec.linears(layer)}

    def _floats(self, name: str, rows: tuple[int, int] | None = None) -> NDArray[np.float32]:
        shard = self._shard(name)
        values = shard.float32(name, rows)
        # Both are NaN if one value is; unlike isfinite over the array, they take no memory.
        if not (np.isfinite(values.min()) and np.isfinite(values.max())):
            raise ModelFormatError(f"{shard.where}: tensor {shown(name)} holds NaN or infinity")
        return values

    def _quantized(self, name: str) -> MatrixRows:
        """The format has a weight's outputs as columns."""
        stem, linear, config = name.removesuffix(".weight"), self._linears[name], self.gptq_config
        out, per_word = linear.out_features, 32 // config.bits
        qweight, qzeros, scales, g_idx = (f"{stem}.{x}" for x in ("qweight", "qzeros", "scales", "g_idx"))
        groups = self._shard(g_idx).raw(g_idx) if g_idx in self._shards else None

        def read(begin: int, end: int) -> QuantizedTensor:
            return from_gptq(
                self._shard(qweight).columns(qweight, begin, end),
                self._shard(qzeros).columns(qzeros, begin // per_word, -(-end // per_word)),
                self._shard(scales).columns(scales, begin, end),
                groups,
                bits=config.bits,
                group_size=config.group_size,
                checkpoint_format=config.checkpoint_format,
                in_features=linear.in_features,
                name=f"{self._shard(qweight).where}: {stem}",
            )

        some = read(0, min(ROW_STEP, out))
        zeros = gptq_zeros(self._shard(qzeros).raw(qzeros), out, config.bits, config.checkpoint_format)
        kind: MatrixKind = "symmetric" if all_in_the_middle(zeros, config.bits) else "zeros"
        return MatrixRows(out, linear.in_features, config.bits, some.group_size, kind, some.permutation, read)

    def _shard(self, name: str) -> SafetensorsFile:
        shard = self._shards.get(name)
        if shard is None:
            raise ModelFormatError(f"{self.folder}: tensor {shown(name)} is missing from the GPTQ checkpoint")
        return shard

    def _check_tensors(self) -> None:
        config = self.gptq_config
        for name, shape in self._shapes.items():
            if name not in self._linears:
                self._check(name, FLOATS, shape)
                continue
            stem = name.removesuffix(".weight")
            for part in linear_layout(stem, shape[0], shape[1], config.bits, config.group_size):
                if not part.name.endswith(".g_idx") or part.name in self._shards:
                    self._check(part.name, (part.dtype,), part.shape)

    def _check(self, name: str, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> None:
        shard = self._shard(name)
        info: TensorInfo = shard.tensors[name]
        if info.shape != shape:
            raise ModelFormatError(
                f"{shard.where}: tensor {shown(name)} is {list(info.shape)}, expected {list(shape)} "
                f"for {self.gptq_config.bits} bits and group size {self.gptq_config.group_size}"
            )
        if info.dtype not in dtypes:
            raise UnsupportedModelError(
                f"{shard.where}: tensor {shown(name)} is {info.dtype}, expected {' or '.join(dtypes)}"
            )


def read_gptq_config(folder: Path, config: dict[str, Any]) -> GptqConfig:
    """The settings in `config.json`'s `quantization_config` and in `quantize_config.json`, whichever is
    there; both must say the same. `config` is the parsed `config.json`."""
    found = []
    if config.get("quantization_config") is not None:
        found.append(GptqConfig.from_json(config["quantization_config"], str(folder / "config.json")))
    path = folder / "quantize_config.json"
    if path.exists():
        found.append(GptqConfig.from_json(read_json_object(path, str(path)), str(path)))
    if not found:
        raise ModelFormatError(
            f"{folder}: neither config.json nor quantize_config.json says how the weights are quantized"
        )
    for name in GptqConfig.__dataclass_fields__:
        values = [getattr(x, name) for x in found]
        if values[0] != values[-1]:
            raise ModelFormatError(f"{path}: {name} is {values[-1]}; config.json says {values[0]}")
    return found[0]


def open_shards(folder: Path) -> dict[str, SafetensorsFile]:
    """Opens `model.safetensors`, or the files its index names: tensor name to opened file."""
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.exists():
        file = SafetensorsFile(single)
        return dict.fromkeys(file.tensors, file)
    if not index.exists():
        raise ModelFormatError(f"{folder}: has neither {SINGLE_FILE} nor {INDEX_FILE}")
    shard_of = checked_weight_map(read_json_object(index, str(index), MAX_INDEX_BYTES), index)
    files: dict[str, SafetensorsFile] = {}
    try:
        for name in sorted(set(shard_of.values())):
            files[name] = SafetensorsFile(folder / name)
        for tensor, name in shard_of.items():
            if tensor not in files[name].tensors:
                raise ModelFormatError(
                    f"{folder / name}: tensor {shown(tensor)} is missing, but {INDEX_FILE} says it is there"
                )
    except BaseException:
        _close_all(list(files.values()))
        raise
    return {tensor: files[name] for tensor, name in shard_of.items()}


def _close_all(files: list[SafetensorsFile]) -> None:
    for file in files:
        file.close()
