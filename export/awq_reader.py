"""Reads AWQ checkpoints in the layout of its "gemm" kernels, as AutoAWQ and transformers write them."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import ModelFormatError, UnsupportedModelError
from ..models.config import spec_from_config
from ..models.config_reader import read_json_object, shown
from ..models.spec import ModelSpec
from ..quant.packing import QuantizedTensor, quantize_head
from ..quant.packing_awq import PER_WORD, from_awq, unpack_awq
from ..quant.packing_rows import MatrixKind, MatrixRows
from .shards import FLOATS, Shards
from .weights import LogicalTensor


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


class AwqWeights:
    """`LogicalWeights` over a folder, as `GptqWeights` is: checked when opened, read when asked for, closed
    by `close`. Embedding, head and layers that are not quantized come in the 8-bit form of
    `packing.quantize_head`."""

    def __init__(self, folder: Path) -> None:
        """Raises `ModelFormatError` or `UnsupportedModelError`, naming the file, tensor or setting."""
        self.folder = Path(folder)
        where = str(self.folder / "config.json")
        config = read_json_object(self.folder / "config.json", where)
        self.spec: ModelSpec = spec_from_config(config, where)
        self.awq_config = AwqConfig.from_json(config["quantization_config"], where)
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
        if self.is_quantized(name):
            return self._quantized(name)

        def read(begin: int, end: int) -> QuantizedTensor:
            return quantize_head(self._shards.floats(name, (begin, end)), name)

        return MatrixRows.of_head(self._shapes[name], read)

    def is_quantized(self, name: str) -> bool:
        return name in self._linears and self.awq_config.converts(name.removesuffix(".weight"))

    @property
    def paths(self) -> list[Path]:
        """The files that hold the tensors."""
        return self._shards.paths

    def close(self) -> None:
        self._shards.close()

    def __enter__(self) -> "AwqWeights":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return self.spec.tensors()

    @cached_property
    def _linears(self) -> frozenset[str]:
        layers = range(self.spec.num_layers)
        return frozenset(linear.name for layer in layers for linear in self.spec.linears(layer))

    def _quantized(self, name: str) -> MatrixRows:
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

    def _check_tensors(self) -> None:
        size = self.awq_config.group_size
        for name, shape in self._shapes.items():
            if not self.is_quantized(name):
                self._shards.check(name, FLOATS, shape)
                continue
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
