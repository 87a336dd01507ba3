"""What a graph is built from: logical tensors, wherever they come from."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelFormatError
from ..models.spec import ModelSpec
from ..quant.model import QuantizedModel
from ..quant.packing import quantize_head
from ..quant.packing_nf4 import AnyQuantized
from ..quant.packing_rows import MatrixRows

LogicalTensor = AnyQuantized | NDArray[np.float32]


class LogicalWeights(Protocol):
    """A model's tensors by their Hugging Face names: `QuantizedTensor` or `Nf4Tensor` for a quantized linear
    layer, the former for the embedding and the head; float32 for norms, biases and gates, and for everything
    of an unquantized model."""

    @property
    def spec(self) -> ModelSpec: ...

    def tensor(self, name: str) -> LogicalTensor: ...

    def matrix(self, name: str) -> MatrixRows | None:
        """A quantized tensor of two dimensions, to be read some rows at a time: the same as `tensor`, but
        never whole in memory. None for one that is not quantized."""
        ...


class QuantizedModelWeights:
    """`LogicalWeights` over a quantized model in memory."""

    def __init__(self, model: QuantizedModel) -> None:
        self._model = model

    @property
    def spec(self) -> ModelSpec:
        return self._model.spec

    def tensor(self, name: str) -> LogicalTensor:
        """One of `spec.tensors()`; the embedding and the head in the form of `quantize_head`."""
        tensor = self._model.tensors.get(name)
        if tensor is None:
            raise ModelFormatError(f"{name}: is missing from the quantized model")
        if not isinstance(tensor, np.ndarray):
            return tensor
        if name in (self.spec.embedding_name, self.spec.head_name):
            return quantize_head(tensor, name)
        return tensor.astype(np.float32)

    def matrix(self, name: str) -> MatrixRows | None:
        tensor = self.tensor(name)
        return None if isinstance(tensor, np.ndarray) else MatrixRows.of(tensor)
