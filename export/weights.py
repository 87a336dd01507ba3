"""What a graph is built from: logical tensors, wherever they come from."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..models.spec import ModelSpec
from ..quant.packing import QuantizedTensor

LogicalTensor = QuantizedTensor | NDArray[np.float32]


class LogicalWeights(Protocol):
    """A model's tensors by their Hugging Face names: `QuantizedTensor` for a quantized linear layer, the
    embedding and the head; float32 for norms and biases, and for everything of an unquantized model."""

    @property
    def spec(self) -> ModelSpec: ...

    def tensor(self, name: str) -> LogicalTensor: ...
