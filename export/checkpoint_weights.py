"""`CheckpointWeights`: what readers of quantized Hugging Face folders have in common."""

from abc import ABC, abstractmethod
from functools import cached_property
from pathlib import Path
from typing import Self

from ..errors import ModelFormatError
from ..models.config_reader import shown
from ..models.spec import ModelSpec
from ..quant.packing import QuantizedTensor, quantize_head
from ..quant.packing_rows import MatrixRows
from .shards import Shards
from .weights import LogicalTensor


class CheckpointWeights(ABC):
    """`LogicalWeights` over a folder. Opening checks the headers, and every tensor's presence, dtype and
    shape; tensors are read when asked for and not kept. Close it, or use it in a `with`.

    The embedding and the head come in the 8-bit form of `packing.quantize_head`, and so do linear layers that
    the checkpoint left unquantized.
    """

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        """Raises `ModelFormatError` or `UnsupportedModelError`, naming the file or tensor."""
        self.folder, self.spec = folder, spec
        self._shards = Shards(folder)
        try:
            for name, shape in self._shapes.items():
                self._check(name, shape)
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises where what is stored of a tensor of the model is not there or not as the config says."""

    @abstractmethod
    def _quantized(self, name: str) -> MatrixRows | None:
        """A tensor of two dimensions as it is quantized; None where it is not."""

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
        quantized = self._quantized(name)
        if quantized is not None and name in self._linears:
            return quantized

        def read(begin: int, end: int) -> QuantizedTensor:
            if quantized is None:
                return quantize_head(self._shards.floats(name, (begin, end)), name)
            return quantize_head(quantized.read(begin, end).dequantize(), name)

        return MatrixRows.of_head(self._shapes[name], read)

    @property
    def paths(self) -> list[Path]:
        """The files that hold the tensors."""
        return self._shards.paths

    def close(self) -> None:
        self._shards.close()

    def __enter__(self) -> Self:
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
