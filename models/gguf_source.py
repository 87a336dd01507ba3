"""A GGUF file as a `ModelSource`: tensors under their Hugging Face names, in float32."""

import hashlib
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ..errors import MissingDependencyError, ModelFormatError, UnsupportedModelError
from .config import spec_from_config
from .gguf_config import Metadata, config_from_metadata
from .gguf_file import GgufTensor, read_bytes, read_header
from .gguf_tokenizer import generation_config, tokenizer_files
from .spec import ModelSpec

# Types that `gguf.quants` decodes besides the plain ones, which numpy does.
PLAIN_TYPES = ("F32", "F16", "BF16")
BLOCK_QUANTS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
_CHUNK_ELEMENTS = 1 << 20  # decoded at once; bounds the working memory beside the tensor itself
_DIGEST_CHUNK = 1 << 20

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_ROPE_FACTORS = "rope_freqs.weight"


def gguf_name(name: str) -> str:
    """The GGUF name of a tensor with this Hugging Face name: `model.layers.3.mlp.up_proj.weight` is
    `blk.3.ffn_up.weight`."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    layer, module = name.removeprefix("model.layers.").split(".", 1)
    module, kind = module.rsplit(".", 1)
    return f"blk.{layer}.{_LAYER_NAMES[module]}.{kind}"


def open_gguf(path: Path, origin: str) -> "GgufSource":
    """Open a GGUF file; `origin` is what messages and the manifest call it.

    The header, every tensor's type, shape and place, and the tokenizer are checked here; tensors are read
    later. Raises `ModelFormatError` or `UnsupportedModelError`.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ModelFormatError(f"{origin}: cannot be opened: {error.strerror}") from error
    try:
        return GgufSource(fd, origin)
    except BaseException:
        os.close(fd)
        raise


class GgufSource:
    """See `ModelSource`. Owns the file descriptor."""

    def __init__(self, fd: int, origin: str) -> None:
        self._fd = fd
        self.origin = origin
        header = read_header(fd, origin)
        meta = Metadata(header.metadata, origin)
        parts = meta.integer("split.count", 1)
        if parts > 1:
            raise UnsupportedModelError(
                f"{origin}: one of {parts} parts of a split GGUF; merge them into one file first"
            )
        self._tensors = header.tensors
        factors = self._rope_factors()
        self.config: dict[str, Any] = config_from_metadata(
            meta, {name: tensor.shape for name, tensor in header.tensors.items()}, factors
        )
        self.spec: ModelSpec = spec_from_config(self.config, origin)
        # Conversion to GGUF interleaves the halves of each q and k head for the llama architecture only.
        self._permuted = meta.text("general.architecture") == "llama"
        self._check_tensors()
        self.tokenizer_files: Mapping[str, bytes] = tokenizer_files(meta, self.spec.vocab_size)
        self.generation_config: dict[str, Any] = generation_config(meta)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the file, hexadecimal, read in chunks."""
        digest, size = hashlib.sha256(), os.fstat(self._fd).st_size
        for offset in range(0, size, _DIGEST_CHUNK):
            block = np.empty(min(_DIGEST_CHUNK, size - offset), np.uint8)
            read_bytes(self._fd, offset, block, self.origin)
            digest.update(block.data)
        return digest.hexdigest()

    def tensor(self, name: str) -> NDArray[np.float32]:
        """One tensor by its Hugging Face name, float32. Raises `ModelFormatError` where it holds a NaN or an
        infinity, `MissingDependencyError` where its type needs the `gguf` package."""
        if name not in self.spec.tensors():
            raise ModelFormatError(f"{self.origin}: the model has no tensor {name!r}")
        values = self._decode(self._tensors[gguf_name(name)])
        if self._permuted and ".self_attn.q_proj." in name:
            return _undo_permutation(values, self.spec.num_heads)
        if self._permuted and ".self_attn.k_proj." in name:
            return _undo_permutation(values, self.spec.num_kv_heads)
        return values

    def _rope_factors(self) -> NDArray[np.float32] | None:
        entry = self._tensors.get(_ROPE_FACTORS)
        if entry is None:
            return None
        if entry.type.name not in PLAIN_TYPES or entry.nbytes > _CHUNK_ELEMENTS:
            raise ModelFormatError(f"{self.origin}: tensor {_ROPE_FACTORS!r} is not a short float vector")
        return self._decode(entry)

    def _check_tensors(self) -> None:
        """Exactly the tensors of the spec, each of its shape and of a type that is read."""
        expected = {gguf_name(name): (name, shape) for name, shape in self.spec.tensors().items()}
        for name, (source, shape) in expected.items():
            entry = self._tensors.get(name)
            if entry is None:
                raise ModelFormatError(f"{self.origin}: tensor {name!r} ({source}) is missing")
            if entry.shape != shape:
                raise ModelFormatError(
                    f"{self.origin}: tensor {name!r} has shape {entry.shape}; expected {shape}"
                )
            if entry.type.name not in PLAIN_TYPES + BLOCK_QUANTS:
                raise UnsupportedModelError(
                    f"{self.origin}: tensor {name!r} has type {entry.type.name}; supported: "
                    + ", ".join(PLAIN_TYPES + BLOCK_QUANTS)
                )
        for name in self._tensors:
            if name not in expected and name != _ROPE_FACTORS:
                raise UnsupportedModelError(
                    f"{self.origin}: tensor {name[:64]!r} is not part of a supported {self.spec.model_type}"
                )

    def _decode(self, entry: GgufTensor) -> NDArray[np.float32]:
        """The tensor in float32, its rows in chunks, so that only a chunk is held in both forms."""
        values = np.empty(entry.shape, np.float32)
        columns = entry.shape[-1]
        rows = values.reshape(-1, columns)
        row_bytes = columns // entry.type.elements * entry.type.nbytes
        step = max(1, _CHUNK_ELEMENTS // columns)
        for first in range(0, len(rows), step):
            part = rows[first : first + step]
            raw = np.empty((len(part), row_bytes), np.uint8)
            read_bytes(self._fd, entry.offset + first * row_bytes, raw, self.origin)
            part[:] = _to_float32(raw, entry.type.name)
            if not np.isfinite(part).all():
                raise ModelFormatError(f"{self.origin}: tensor {entry.name!r} holds a NaN or an infinity")
        return values


def _to_float32(raw: NDArray[np.uint8], kind: str) -> NDArray[np.float32]:
    """Rows of blocks [rows, bytes] to [rows, columns] float32."""
    if kind == "F32":
        return raw.view("<f4")
    if kind == "F16":
        return raw.view("<f2").astype(np.float32)
    if kind == "BF16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError:
        raise MissingDependencyError(
            f"{kind} tensors need the gguf package: install it with: pip install 'nybble[quantize]'"
        ) from None
    # A damaged block's scale overflows to the infinity that the caller reports.
    with np.errstate(all="ignore"):
        decoded: NDArray[np.float32] = dequantize(raw, GGMLQuantizationType[kind])
    return decoded


def _undo_permutation(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of each head from the interleaved order (0, d/2, 1, d/2 + 1, …) back to Hugging Face's halves."""
    rows = values.reshape(heads, values.shape[0] // heads // 2, 2, -1)
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(values.shape)
