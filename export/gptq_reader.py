"""Reads a GPTQ checkpoint back as logical tensors: the artifact's half, and what GPTQModel or AutoGPTQ wrote
in the same layout."""

from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ..errors import ModelFormatError, UnsupportedModelError
from ..models.config import spec_from_config
from ..models.config_reader import read_json_object
from ..quant.packing import QuantizedTensor, from_gptq, gptq_zeros
from ..quant.packing_narrow import widen_gptq, widened_zeros
from ..quant.packing_rows import ROW_STEP, MatrixKind, MatrixRows, all_in_the_middle
from ..quant.recipe import BITS, GROUP_SIZES, ActOrder, Recipe
from .checkpoint_weights import CheckpointWeights
from .gptq import linear_layout
from .gptq_config import GptqConfig
from .layer_overrides import StoredFormat
from .shards import FLOATS


class GptqWeights(CheckpointWeights):
    """Layers of 2 and 3 bits come as 4 bits that stand for the same weights."""

    def __init__(self, folder: Path) -> None:
        """Raises `ModelFormatError` or `UnsupportedModelError`, naming the file, tensor or setting."""
        folder = Path(folder)
        where = str(folder / "config.json")
        config = read_json_object(folder / "config.json", where)
        spec = spec_from_config(config, where)
        self.gptq_config = read_gptq_config(folder, config)
        if self.gptq_config.lm_head and spec.tied_embeddings:
            raise UnsupportedModelError(
                f"{where}: lm_head is true, but the head is the embedding, which is not quantized"
            )
        super().__init__(folder, spec)

    @property
    def recipe(self) -> Recipe | None:
        config = self.gptq_config
        if config.dynamic or config.bits not in BITS or config.group_size not in GROUP_SIZES:
            return None
        act_order: ActOrder = "dynamic" if config.desc_act else "static"
        return Recipe(
            bits=config.bits, group_size=config.group_size, symmetric=config.sym, act_order=act_order
        )

    def format_of(self, name: str) -> StoredFormat | None:
        """How a tensor of the checkpoint, of two dimensions, is stored; None where it is not quantized."""
        config = self.gptq_config
        if name in self._linears or (config.lm_head and name == self.spec.head_name):
            return config.format_of(name.removesuffix(".weight"))
        return None

    def _quantized(self, name: str) -> MatrixRows | None:
        """The format has a weight's outputs as columns."""
        stored = self.format_of(name)
        if stored is None:
            return None
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

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        stored = self.format_of(name)
        if stored is None:
            self._shards.check(name, FLOATS, shape)
            return
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
