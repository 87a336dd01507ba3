"""A GGUF file's tensors as they run: at the file's own bits where the kernels' tiles express them."""

import logging
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from ..models.gguf_source import GgufSource
from ..models.spec import ModelSpec
from ..quant.packing import QuantizedTensor, quantize_head
from ..quant.packing_ggml import BLOCK, GgmlType, from_ggml
from .weights import LogicalTensor

log = logging.getLogger("nybble")


class GgufWeights:
    """`LogicalWeights` over an open GGUF file: tensors are read when asked for and not kept, the largest in
    chunks of rows.

    Linear layers in Q4_0, Q4_1 and Q8_0 keep their integers, scales and minima, and so do an embedding and a
    head in Q8_0. Everything else is rounded to 8 bits as `quantize_head` defines; how many linear layers are
    is one line in the log `nybble`.
    """

    def __init__(self, source: GgufSource) -> None:
        self._source = source
        layers = range(self.spec.num_layers)
        types = [source.type_of(linear.name) for layer in layers for linear in self.spec.linears(layer)]
        rounded = Counter(kind for kind in types if kind != kept_type(kind))
        if rounded:
            counts = ", ".join(f"{count} in {kind}" for kind, count in sorted(rounded.items()))
            log.info(
                "%s: %d of %d linear layers are rounded to 8 bits: %s",
                source.origin,
                rounded.total(),
                len(types),
                counts,
            )

    @property
    def spec(self) -> ModelSpec:
        return self._source.spec

    def tensor(self, name: str) -> LogicalTensor:
        """One of `spec.tensors()`. Raises as `GgufSource.tensor` does, and `QuantizationError` for a value
        that leaves float16's range where it is rounded."""
        shape = self.spec.tensors().get(name, ())
        if len(shape) != 2:
            return self._source.tensor(name)
        kind = self._source.type_of(name)
        kept = kept_type(kind, ends=name in (self.spec.embedding_name, self.spec.head_name))
        result = _empty(*shape, kept)
        for rows, blocks in self._source.rows(name):
            where = f"{self._source.origin}: {name}"
            part = (
                from_ggml(blocks, kept, where)
                if kind == kept
                else quantize_head(self._source.to_float32(name, blocks), where)
            )
            result.packed[rows], result.scales[rows] = part.packed, part.scales
            if result.minima is not None and part.minima is not None:
                result.minima[rows] = part.minima
        return result


def kept_type(kind: str, ends: bool = False) -> GgmlType:
    """What a matrix of a ggml type runs as: the same where tiles express it, else 8 bits. `ends` are the
    embedding and the head, always of 8 bits."""
    if kind == "Q4_0" and not ends:
        return "Q4_0"
    return "Q4_1" if kind == "Q4_1" and not ends else "Q8_0"


def _empty(rows: int, columns: int, kind: GgmlType) -> QuantizedTensor:
    """A tensor to be filled."""

    def floats() -> NDArray[np.float16]:
        return np.empty((rows, -(-columns // BLOCK)), np.float16)

    bits = 8 if kind == "Q8_0" else 4
    packed = np.empty((rows, columns * bits // 8), np.uint8)
    minima = floats() if kind == "Q4_1" else None
    return QuantizedTensor(packed, floats(), None, bits, BLOCK, columns, minima=minima)
