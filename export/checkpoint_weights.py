"""`CheckpointWeights`: what readers of quantized Hugging Face folders have in common."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Self

from ..errors import ModelFormatError
from ..models.config_reader import shown
from ..models.spec import LinearSpec, ModelSpec, StoredRows
from ..quant.packing import QuantizedTensor, quantize_head
from ..quant.packing_rows import MatrixRows
from ..quant.recipe import Recipe
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
            self._lay_out()
            for name, shape in self._shapes.items():
                self._check(name, shape)
        except BaseException:
            self.close()
            raise

    @property
    @abstractmethod
    def recipe(self) -> Recipe | None:
        """How all linear layers were quantized, as far as that says what they take; None where they differ,
        or are as no recipe makes them."""

    @abstractmethod
    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises where what is stored of a tensor is not there or not as the config says."""

    @abstractmethod
    def _quantized(self, name: str) -> MatrixRows | None:
        """A tensor of the checkpoint, of two dimensions, as it is quantized; None where it is not."""

    def tensor(self, name: str) -> LogicalTensor:
        """One of `spec.tensors()`. Raises `ModelFormatError` for another name or damaged content."""
        matrix = self.matrix(name)
        if matrix is not None:
            return matrix.whole()
        stored, begin, end = self._rows[name]
        return self._shards.floats(stored, (begin, end))

    def matrix(self, name: str) -> MatrixRows | None:
        """Raises as `tensor` does, and so do its parts."""
        rows = self._rows.get(name)
        if rows is None:
            raise ModelFormatError(f"{self.folder}: the model has no tensor {shown(name)}")
        stored = rows.name
        if name in self.spec.float_names:
            return None
        quantized = self._quantized(stored)
        if quantized is not None and stored in self._linears:
            return quantized.part(rows.begin, rows.end)

        def read(begin: int, end: int) -> QuantizedTensor:
            if quantized is None:
                return quantize_head(self._shards.floats(stored, (begin, end)), stored)
            return quantize_head(quantized.read(begin, end).dequantize(), stored)

        return MatrixRows.of_head(self._shapes[stored], read).part(rows.begin, rows.end)

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

    def _lay_out(self) -> None:
        """Finds the checkpoint's tensors, by the names they would have were it not quantized, and where each
        of the model's is in them. GPTQModel takes a family's fused layers apart, and does not say so."""
        spec = self.spec
        self._shapes, self._rows = spec.stored_tensors(), spec.stored_rows()
        linears = []
        for layer in range(spec.num_layers):
            for stored, parts in spec.stored_linears(layer):
                if len(parts) == 1 or self._holds(stored) or not all(map(self._holds, parts)):
                    linears.append(stored.name)
                    continue
                for name in (stored.name, stored.bias_name):
                    self._shapes.pop(name, None)
                for part in parts:
                    linears.append(part.name)
                    self._shapes[part.name] = (part.out_features, part.in_features)
                    self._rows[part.name] = StoredRows(part.name, 0, part.out_features)
                    if part.bias:
                        self._shapes[part.bias_name] = (part.out_features,)
                        self._rows[part.bias_name] = StoredRows(part.bias_name, 0, part.out_features)
        self._linears = frozenset(linears)

    def _holds(self, linear: LinearSpec) -> bool:
        """Whether there is such a layer, quantized or not."""
        quantized = linear.name.removesuffix(".weight") + ".qweight"
        return linear.name in self._shards or quantized in self._shards
