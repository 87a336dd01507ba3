"""A model of 1.5 billion weights, as large ones for small devices are: seeded random integers in 4 bits."""

import zlib
from pathlib import Path

import numpy as np

from nybble.export.weights import LogicalTensor
from nybble.models.gguf_families import FAMILIES
from nybble.models.gguf_source import gguf_name
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


def write_gguf(file: Path) -> None:
    """A model of the same shape as llama.cpp has it: Q4_0, which has a scale for every 32 weights, and the
    embedding in Q8_0. It has no vocabulary."""
    from gguf import GGMLQuantizationType, GGUFWriter

    layer_names = FAMILIES["llama"].layer_names
    writer = GGUFWriter(file, "llama")
    writer.add_vocab_size(SPEC.vocab_size)
    writer.add_tokenizer_model("none")
    writer.add_context_length(SPEC.max_position)
    writer.add_embedding_length(SPEC.hidden_size)
    writer.add_feed_forward_length(SPEC.intermediate_size)
    writer.add_block_count(SPEC.num_layers)
    writer.add_head_count(SPEC.num_heads)
    writer.add_head_count_kv(SPEC.num_kv_heads)
    writer.add_layer_norm_rms_eps(SPEC.norm_eps)
    writer.add_rope_freq_base(SPEC.rope.theta)
    writer.add_rope_dimension_count(SPEC.head_dim)
    for name, shape in SPEC.tensors().items():
        if name.endswith("bias"):
            continue  # this architecture has none
        if len(shape) == 1:
            writer.add_tensor(gguf_name(name, layer_names), np.ones(shape, np.float32))
            continue
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        rows, columns = shape
        kind, bytes_each = ("Q8_0", 32) if name == SPEC.embedding_name else ("Q4_0", 16)
        blocks = np.empty((rows, columns // 32, 2 + bytes_each), np.uint8)
        scale = np.float16(columns**-0.5 / (4 * bytes_each))
        blocks[..., :2] = np.frombuffer(scale.tobytes(), np.uint8)
        blocks[..., 2:] = rng.integers(0, 256, (rows, columns // 32, bytes_each), np.uint8)
        writer.add_tensor(
            gguf_name(name, layer_names), blocks.reshape(rows, -1), raw_dtype=GGMLQuantizationType[kind]
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
