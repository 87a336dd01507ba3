"""A GGUF file's tensors as they run: at the file's own bits where the kernels' tiles express them."""

import logging
from collections import Counter

from ..models.gguf_source import GgufSource
from ..models.spec import ModelSpec
from ..quant.packing import QuantizedTensor, quantize_head
from ..quant.packing_ggml import BLOCK, GgmlType, from_ggml
from ..quant.packing_rows import MatrixKind, MatrixRows
from .weights import LogicalTensor

log = logging.getLogger("nybble")


class GgufWeights:
    """`LogicalWeights` over an open GGUF file: tensors are read when asked for and not kept.

    Linear layers in Q4_0, Q4_1 and Q8_0 keep their integers, scales and minima, and so do an embedding and a
    head in Q8_0. Everything else is rounded to 8 bits as `quantize_head` defines; how many linear layers are
    is one line in the log `nybble`.
    """

    def __init__(self, source: GgufSource) -> None:
        self._source = source
        self._shapes = source.spec.tensors()
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
        matrix = self.matrix(name)
        return self._source.tensor(name) if matrix is None else matrix.whole()

    def matrix(self, name: str) -> MatrixRows | None:
        """Raises as `tensor` does, and so do its parts."""
        shape = self._shapes.get(name, ())
        if len(shape) != 2:
            return None
        stored, where = self._source.type_of(name), f"{self._source.origin}: {name}"
        kept = kept_type(stored, ends=name in (self.spec.embedding_name, self.spec.head_name))

        def read(begin: int, end: int) -> QuantizedTensor:
            blocks = self._source.rows(name, begin, end)
            if stored == kept:
                return from_ggml(blocks, kept, where)
            return quantize_head(self._source.to_float32(name, blocks), where)

        kind: MatrixKind = "minima" if kept == "Q4_1" else "symmetric"
        return MatrixRows(*shape, 8 if kept == "Q8_0" else 4, BLOCK, kind, None, read)


def kept_type(kind: str, ends: bool = False) -> GgmlType:
    """What a matrix of a ggml type runs as: the same where tiles express it, else 8 bits. `ends` are the
    embedding and the head, always of 8 bits."""
    if kind == "Q4_0" and not ends:
        return "Q4_0"
    return "Q4_1" if kind == "Q4_1" and not ends else "Q8_0"
