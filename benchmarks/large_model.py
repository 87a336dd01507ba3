"""A model of 1.5 billion weights, as large ones for small devices are: seeded random integers in 4 bits."""

import zlib
from pathlib import Path

import numpy as np

from nybble.export.weights import LogicalTensor
from nybble.models.spec import ModelSpec, RopeSpec
from nybble.quant.packing import HEAD_GROUP_SIZE, QuantizedTensor
from nybble.quant.packing_rows import MatrixRows
from nybble.runtime.packed_cache import build_packed
from nybble.runtime.packed_weights import FreshlyPacked

DIGEST = "15" * 32
GROUP_SIZE = 64
# The shape of Qwen2.5-1.5B.
SPEC = ModelSpec(
    model_type="qwen2",
    vocab_size=151936,
    hidden_size=1536,
    intermediate_size=8960,
    num_layers=28,
    num_heads=12,
    num_kv_heads=2,
    head_dim=128,
    max_position=32768,
    norm_eps=1e-6,
    rope=RopeSpec(theta=1e6, rotary_dim=128),
    tied_embeddings=True,
)


class RandomWeights:
    """`LogicalWeights`: a tensor is made when it is asked for."""

    spec = SPEC

    def tensor(self, name: str) -> LogicalTensor:
        shape = SPEC.tensors()[name]
        if len(shape) == 1:
            return np.ones(shape, np.float32)
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        rows, columns = shape
        bits, group = (8, HEAD_GROUP_SIZE) if name == SPEC.embedding_name else (4, GROUP_SIZE)
        packed = rng.integers(0, 256, (rows, columns * bits // 8), np.uint8)
        scales = np.full((rows, columns // group), columns**-0.5 * 2.0 ** (2 - bits), np.float16)
        return QuantizedTensor(packed, scales, None, bits, group, columns)

    def matrix(self, name: str) -> MatrixRows | None:
        tensor = self.tensor(name)
        return MatrixRows.of(tensor) if isinstance(tensor, QuantizedTensor) else None


def write(file: Path) -> None:
    """The model's file of packed weights, in a folder that is made for it."""
    file.parent.parent.mkdir(parents=True, exist_ok=True)
    build_packed(file, FreshlyPacked(RandomWeights()), DIGEST)
