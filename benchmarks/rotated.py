"""A model whose residual stream was rotated: the same function, with other weights.

SmolLM2's file holds a 4-bit grid, so quantizing it measures requantizing. Here the weights of the norms are
folded into the linear layers that read them, and the residual stream is multiplied by a random orthogonal
matrix Q: RMSNorm without weights commutes with it. What reads the stream becomes W diag(norm) Q, what writes
it Qᵀ W. No grid is left, and the logits are the same but for rounding (SliceGPT,
https://arxiv.org/abs/2401.15024).
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nybble.models import ModelSource
from nybble.models.spec import ModelSpec

A_LITTLE = 0.16  # of a turn: 0.95 on the matrix's diagonal


class RotatedSource:
    """A `ModelSource` of family llama with its residual stream rotated; the head is never tied.

    `turn` is how far: 1 is a matrix uniform among the orthogonal ones. `A_LITTLE` leaves each channel mostly
    as it is, its outliers too, and still leaves no grid."""

    def __init__(self, source: ModelSource, seed: int = 0, turn: float = 1) -> None:
        self._source = source
        self.spec: ModelSpec = replace(source.spec, tied_embeddings=False)
        self.config: dict[str, Any] = {**source.config, "tie_word_embeddings": False}
        self.generation_config = source.generation_config
        self.tokenizer_files: Mapping[str, bytes] = source.tokenizer_files
        self.origin = f"{source.origin}, rotated"
        self.digest = source.digest
        size = source.spec.hidden_size
        random = np.random.default_rng(seed).normal(size=(size, size))
        if turn < 1:  # Cayley's transform of a skew-symmetric matrix
            skew, one = np.triu(random, 1) * turn / np.sqrt(size), np.eye(size)
            self.rotation = np.linalg.solve(one + skew - skew.T, one - skew + skew.T)
            return
        q, r = np.linalg.qr(random)
        self.rotation = q * np.sign(np.diagonal(r))  # uniform among orthogonal matrices

    @cached_property
    def _readers(self) -> dict[str, str]:
        """The norm that each linear layer's input comes from, by the layer's weight."""
        spec = self.spec
        found = {spec.head_name: spec.final_norm_name}
        for layer in range(spec.num_layers):
            norms, (q, k, v, _, gate, up, _) = spec.layer_norms(layer), spec.linears(layer)
            found |= dict.fromkeys((q.name, k.name, v.name), str(norms.before_attention))
            found |= dict.fromkeys((gate.name, up.name), str(norms.before_mlp))
        return found

    @cached_property
    def _writers(self) -> set[str]:
        layers = range(self.spec.num_layers)
        return {self.spec.linears(layer)[index].name for layer in layers for index in (3, 6)}

    def tensor(self, name: str) -> NDArray[np.float32]:
        spec, own = self.spec, self._source.spec
        stored = own.head_name if name == spec.head_name else name
        weight = self._source.tensor(stored)
        if name in self._readers:
            norm = self._source.tensor(self._readers[name]).astype(np.float64)
            return ((weight * norm) @ self.rotation).astype(np.float32)
        if name in self._writers:
            return (self.rotation.T @ weight).astype(np.float32)
        if name == spec.embedding_name:
            return (weight @ self.rotation).astype(np.float32)
        return np.ones_like(weight) if weight.ndim == 1 else weight

    def close(self) -> None:
        self._source.close()
