"""`QuantizedModel`: what quantization gives and export writes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..models.spec import ModelSpec
from .packing_nf4 import AnyQuantized
from .recipe import Recipe


@dataclass(eq=False)
class QuantizedModel:
    """A quantized model in memory. Linear layers of the decoder are `QuantizedTensor`s or `Nf4Tensor`s;
    embedding, head, norms, biases and gates are float16 (the head's 8-bit form follows from it:
    `packing.quantize_head`)."""

    spec: ModelSpec
    config: dict[str, Any]
    generation_config: dict[str, Any]
    tokenizer_files: Mapping[str, bytes]
    recipe: Recipe
    origin: str
    source_digest: str
    tensors: dict[str, AnyQuantized | NDArray[np.float16]]
    # Per linear layer, by tensor name: mean squared error of its output on the calibration text over the
    # output's mean square (of its weight, for RTN).
    layer_errors: dict[str, float] = field(default_factory=dict)
    # Per layer, by its number: experts of its mixture that too few tokens reached (`experts.py`), if any.
    starved_experts: dict[str, int] = field(default_factory=dict)
    calibration_digest: str | None = None  # SHA-256 of the calibration text
