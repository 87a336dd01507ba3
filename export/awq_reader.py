"""Reads AWQ checkpoints in the layout of its "gemm" kernels, as AutoAWQ and transformers write them."""

from pathlib import Path
from typing import Any

from ..errors import ModelFormatError, UnsupportedModelError
from ..models.config import spec_from_config
from ..models.config_reader import read_json_object, shown
from ..quant.packing import QuantizedTensor
from ..quant.packing_awq import PER_WORD, from_awq, unpack_awq
from ..quant.packing_rows import MatrixKind, MatrixRows
from ..quant.recipe import GROUP_SIZES, Recipe
from ..records import dataclass
from .checkpoint_weights import CheckpointWeights
from .shards import FLOATS


@dataclass(frozen=True)
class AwqConfig:
    """The fields a reader needs of an AWQ `quantization_config`. Layers whose name holds one of
    `not_converted` are not quantized."""

    group_size: int
    not_converted: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, data: dict[str, Any], where: str) -> "AwqConfig":
        """Raises `ModelFormatError` for a field of the wrong type, `UnsupportedModelError` for what Nybble
        does not read."""
        bits = data.get("bits", data.get("w_bit"))
        version = data.get("version", "gemm")
        for name, value, expected in (
            ("bits", bits, 4),
            ("version", str(version).lower(), "gemm"),
            ("zero_point", data.get("zero_point", True), True),
        ):
            if value != expected or isinstance(value, bool) != isinstance(expected, bool):
                raise UnsupportedModelError(f"{where}: {name} is {shown(value)}; supported is {expected}")
        size = data.get("group_size", data.get("q_group_size"))
        if isinstance(size, bool) or not isinstance(size, int) or (size != -1 and not 1 <= size < 1 << 31):
            raise ModelFormatError(f"{where}: group_size is {shown(size)}; expected -1 or a positive size")
        skipped = data.get("modules_to_not_convert") or []
        if not isinstance(skipped, list) or not all(isinstance(name, str) and name for name in skipped):
            raise ModelFormatError(f"{where}: modules_to_not_convert is {shown(skipped)}; expected names")
        return cls(size, tuple(skipped))

    def converts(self, stem: str) -> bool:
        """Whether a layer, by its name without `.weight`, is quantized."""
        return not any(name in stem for name in self.not_converted)


class AwqWeights(CheckpointWeights):
    """Layers of 4 bits with zero points, all with the same group size."""

    def __init__(self, folder: Path) -> None:
        """Raises `ModelFormatError` or `UnsupportedModelError`, naming the file, tensor or setting."""
        folder = Path(folder)
        where = str(folder / "config.json")
        config = read_json_object(folder / "config.json", where)
        self.awq_config = AwqConfig.from_json(config["quantization_config"], where)
        super().__init__(folder, spec_from_config(config, where))

    @property
    def recipe(self) -> Recipe | None:
        config = self.awq_config
        if config.not_converted or config.group_size not in GROUP_SIZES:
            return None
        return Recipe(bits=4, group_size=config.group_size, symmetric=False)

    def is_quantized(self, name: str) -> bool:
        return name in self._linears and self.awq_config.converts(name.removesuffix(".weight"))

    def _quantized(self, name: str) -> MatrixRows | None:
        if not self.is_quantized(name):
            return None
        stem, (out, columns), shards = name.removesuffix(".weight"), self._shapes[name], self._shards
        size = columns if self.awq_config.group_size == -1 else self.awq_config.group_size

        def read(begin: int, end: int) -> QuantizedTensor:
            words = begin // PER_WORD, -(-end // PER_WORD)
            return from_awq(
                shards.columns(f"{stem}.qweight", *words),
                shards.columns(f"{stem}.qzeros", *words),
                shards.columns(f"{stem}.scales", begin, end),
                group_size=size,
                name=f"{shards.file(f'{stem}.qweight').where}: {stem}",
            )

        middle = (unpack_awq(shards.raw(f"{stem}.qzeros")) == 8).all()
        kind: MatrixKind = "symmetric" if middle else "zeros"
        return MatrixRows(out, columns, 4, size, kind, None, read)

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        if not self.is_quantized(name):
            self._shards.check(name, FLOATS, shape)
            return
        size = self.awq_config.group_size
        stem, (out, columns) = name.removesuffix(".weight"), shape
        groups = 1 if size == -1 else -(-columns // size)
        if out % PER_WORD:
            raise UnsupportedModelError(
                f"{self.folder}: tensor {shown(name)} has {out} outputs; AWQ has a multiple of {PER_WORD}"
            )
        why = f" for 4 bits and group size {size}"
        self._shards.check(f"{stem}.qweight", ("I32",), (columns, out // PER_WORD), why)
        self._shards.check(f"{stem}.qzeros", ("I32",), (groups, out // PER_WORD), why)
        self._shards.check(f"{stem}.scales", ("F16",), (groups, out), why)
