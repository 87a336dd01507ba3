"""Reads a GPTQ checkpoint back as logical tensors: the artifact's half, and what GPTQModel or AutoGPTQ wrote
in the same layout."""

from functools import cached_property
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ..errors import ModelFormatError, UnsupportedModelError
from ..models.config import spec_from_config
from ..models.config_reader import read_json_object, shown
from ..models.spec import LinearSpec, ModelSpec
from ..quant.packing import QuantizedTensor, from_gptq, gptq_zeros, quantize_head
from ..quant.packing_narrow import widen_gptq, widened_zeros
from ..quant.packing_rows import ROW_STEP, MatrixKind, MatrixRows, all_in_the_middle
from .gptq import linear_layout
from .gptq_config import GptqConfig
from .layer_overrides import LinearFormat
from .shards import FLOATS, Shards
from .weights import LogicalTensor


class GptqWeights:
    """`LogicalWeights` over a folder. Opening checks the configs, the headers, and every tensor's presence,
    dtype and shape; tensors are read when asked for and not kept. Close it, or use it in a `with`.

    The embedding and the head come in the 8-bit form of `packing.quantize_head`, and so do linear layers that
    the checkpoint left unquantized. Those of 2 and 3 bits come as 4 bits that stand for the same weights.
    """

    def __init__(self, folder: Path) -> None:
        """Raises `ModelFormatError` or `UnsupportedModelError`, naming the file, tensor or setting."""
        self.folder = Path(folder)
        config_path = self.folder / "config.json"
        config = read_json_object(config_path, str(config_path))
        self.spec: ModelSpec = spec_from_config(config, str(config_path))
        self.gptq_config = read_gptq_config(self.folder, config)
        if self.gptq_config.lm_head and self.spec.tied_embeddings:
            raise UnsupportedModelError(
                f"{config_path}: lm_head is true, but the head is the embedding, which is not quantized"
            )
        self._shards = Shards(self.folder)
        try:
            self._check_tensors()
        except BaseException:
            self.close()
            raise

    def tensor(self, name: str) -> LogicalTensor:
        """One of `spec.tensors()`. Raises `ModelFormatError` for another name or damaged content."""
        matrix = self.matrix(name)
        return self._shards.floats(name) if matrix is None else matrix.whole()

    def matrix(self, name: str) -> MatrixRows | None:
        """Raises as `tensor` does, and so do its parts."""
        if name not in self._shapes:
            raise ModelFormatError(f"{self.folder}: the model has no tensor {shown(name)}")
        if len(self._shapes[name]) < 2:
            return None
        stored = self.format_of(name)
        if name in self._linears and stored is not None:
            return self._quantized(name, stored)
        quantized = None if stored is None else self._quantized(name, stored)

        def read(begin: int, end: int) -> QuantizedTensor:
            if quantized is None:
                return quantize_head(self._shards.floats(name, (begin, end)), name)
            return quantize_head(quantized.read(begin, end).dequantize(), name)

        return MatrixRows.of_head(self._shapes[name], read)

    def format_of(self, name: str) -> LinearFormat | None:
        """How a tensor of two dimensions is stored; None where it is not quantized."""
        config = self.gptq_config
        if name in self._linears or (config.lm_head and name == self.spec.head_name):
            return config.format_of(name.removesuffix(".weight"))
        return None

    @property
    def paths(self) -> list[Path]:
        """The files that hold the tensors."""
        return self._shards.paths

    def close(self) -> None:
        self._shards.close()

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

    def _quantized(self, name: str, stored: LinearFormat) -> MatrixRows:
        """The format has a weight's outputs as columns."""
        stem, (out, columns), shards = name.removesuffix(".weight"), self._shapes[name], self._shards
        qweight, qzeros, scales, g_idx = (f"{stem}.{x}" for x in ("qweight", "qzeros", "scales", "g_idx"))
        groups = shards.raw(g_idx) if g_idx in shards else None
        bits, checkpoint_format = stored.bits, self.gptq_config.checkpoint_format

        def words(begin: int, end: int) -> tuple[NDArray[Any], NDArray[Any]]:
            """Of `qweight` and `qzeros`, in 4 or 8 bits."""
            of_weight = shards.columns(qweight, begin, end)
            of_zeros = shards.columns(qzeros, begin * bits // 32, -(-end * bits // 32))
            if bits >= 4:
                return of_weight, of_zeros
            return widen_gptq(
                of_weight,
                of_zeros,
                bits=bits,
                out_features=end - begin,
                in_features=columns,
                checkpoint_format=checkpoint_format,
            )

        def read(begin: int, end: int) -> QuantizedTensor:
            return from_gptq(
                *words(begin, end),
                shards.columns(scales, begin, end),
                groups,
                bits=max(4, bits),
                group_size=stored.group_size,
                checkpoint_format=checkpoint_format if bits >= 4 else "gptq_v2",
                in_features=columns,
                name=f"{shards.file(qweight).where}: {stem}",
            )

        some = read(0, min(ROW_STEP, out))
        zeros_of = gptq_zeros if bits >= 4 else widened_zeros
        zeros = zeros_of(shards.raw(qzeros), out, bits, checkpoint_format)
        kind: MatrixKind = "symmetric" if all_in_the_middle(zeros, some.bits) else "zeros"
        return MatrixRows(out, columns, some.bits, some.group_size, kind, some.permutation, read)

    def _check_tensors(self) -> None:
        for name, shape in self._shapes.items():
            stored = self.format_of(name)
            if stored is None:
                self._shards.check(name, FLOATS, shape)
                continue
            why = f" for {stored.bits} bits and group size {stored.group_size}"
            stem, (out, columns) = name.removesuffix(".weight"), shape
            for part in linear_layout(stem, out, columns, stored.bits, stored.group_size):
                if not part.name.endswith(".g_idx") or part.name in self._shards:
                    self._shards.check(part.name, (part.dtype,), part.shape, why)


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
