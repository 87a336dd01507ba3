"""A GGUF file as a `ModelSource`: tensors under their Hugging Face names, in float32."""

import hashlib
import math
import os
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ..errors import MissingDependencyError, ModelFormatError, UnsupportedModelError
from .config import spec_from_config
from .gguf_config import config_from_metadata
from .gguf_families import FAMILIES
from .gguf_file import GgufTensor, read_bytes, read_header
from .gguf_metadata import Metadata
from .gguf_tokenizer import generation_config, tokenizer_files
from .spec import ModelSpec

# Types that `gguf.quants` decodes besides the plain ones, which numpy does.
PLAIN_TYPES = ("F32", "F16", "BF16")
BLOCK_QUANTS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
_CHUNK_ELEMENTS = 1 << 17  # decoded at once: what that takes stays in a core's cache
_LONGEST_VECTOR = 1 << 20  # bytes of RoPE factors
_DIGEST_CHUNK = 1 << 20

_TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_ROPE_FACTORS = "rope_freqs.weight"


def gguf_name(name: str, layer_names: Mapping[str, str]) -> str:
    """The GGUF name of a tensor with this Hugging Face name: `model.layers.3.mlp.up_proj.weight` is
    `blk.3.ffn_up.weight`, where `layer_names` has "ffn_up" for "mlp.up_proj"."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    layer, module = name.removeprefix("model.layers.").split(".", 1)
    module, kind = module.rsplit(".", 1)
    return f"blk.{layer}.{layer_names[module]}.{kind}"


def open_gguf(path: Path, origin: str) -> "GgufSource":
    """Open a GGUF file; `origin` is what messages and the manifest call it.

    The header and every tensor's type, shape and place are checked here; tensors are read later, and the
    tokenizer's files made, which takes longest. Raises `ModelFormatError` or `UnsupportedModelError`.
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
        self._header_bytes = header.nbytes
        factors = self._rope_factors()
        self.config: dict[str, Any] = config_from_metadata(
            meta, {name: tensor.shape for name, tensor in header.tensors.items()}, factors
        )
        self.spec: ModelSpec = spec_from_config(self.config, origin)
        self._family = FAMILIES[meta.text("general.architecture")]
        self._check_tensors()
        self._meta: Metadata | None = meta

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def tokenizer_files(self) -> Mapping[str, bytes]:
        """The Hugging Face files of its tokenizer. Raises `ModelFormatError` and `UnsupportedModelError`."""
        return self._text_settings[0]

    @property
    def generation_config(self) -> dict[str, Any]:
        """Hugging Face's `generation_config.json`. Raises as `tokenizer_files` does."""
        return self._text_settings[1]

    @cached_property
    def _text_settings(self) -> tuple[Mapping[str, bytes], dict[str, Any]]:
        assert self._meta is not None
        made = tokenizer_files(self._meta, self.spec.vocab_size), generation_config(self._meta)
        self._meta = None  # takes more memory than the files
        return made

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the file, hexadecimal, read in chunks."""
        return self._hash(os.fstat(self._fd).st_size).hexdigest()

    @cached_property
    def quick_digest(self) -> str:
        """SHA-256 of the header, the file's size and the time it was modified, hexadecimal: it tells one file
        from another without reading the weights."""
        digest, status = self._hash(self._header_bytes), os.fstat(self._fd)
        digest.update(f"{status.st_size} {status.st_mtime_ns}".encode())
        return digest.hexdigest()

    def _hash(self, end: int) -> "hashlib._Hash":
        digest = hashlib.sha256()
        for offset in range(0, end, _DIGEST_CHUNK):
            block = np.empty(min(_DIGEST_CHUNK, end - offset), np.uint8)
            read_bytes(self._fd, offset, block, self.origin)
            digest.update(block.data)
        return digest

    def tensor(self, name: str) -> NDArray[np.float32]:
        """One tensor by its Hugging Face name, float32. Raises `ModelFormatError` where it holds a NaN or an
        infinity, `MissingDependencyError` where its type needs the `gguf` package."""
        entry = self._entry(name)
        values, places = self._decode(entry), self._places(name, entry.shape[0])
        if self._family.norm_offset and name.endswith("norm.weight"):
            values -= self._family.norm_offset
        if places is None:
            return values
        result = np.empty_like(values)
        result[places] = values
        return result

    def type_of(self, name: str) -> str:
        """The ggml type of a tensor, by its Hugging Face name."""
        return self._entry(name).type.name

    def rows(self, name: str, begin: int, end: int) -> NDArray[np.uint8]:
        """The blocks of rows begin to end of a matrix, in the order of its Hugging Face tensor: [rows, bytes]
        uint8."""
        entry = self._entry(name)
        heads = self._interleaved_heads(name)
        if heads is None:
            return self._read_rows(entry, begin, end)
        size = entry.shape[0] // heads
        first, last = begin // size * size, -(-end // size) * size
        whole = self._read_rows(entry, first, last).reshape(-1, size // 2, 2, _row_bytes(entry))
        in_order = whole.swapaxes(1, 2).reshape(last - first, -1)
        return in_order[begin - first : end - first]

    def to_float32(self, name: str, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Rows of blocks of a tensor, as `rows` gives them, in float32 [rows, columns]; raises as `tensor`
        does."""
        return self._float32(self._entry(name), raw)

    def _entry(self, name: str) -> GgufTensor:
        if name not in self._names:
            raise ModelFormatError(f"{self.origin}: the model has no tensor {name!r}")
        return self._tensors[gguf_name(name, self._family.layer_names)]

    def _places(self, name: str, rows: int) -> NDArray[np.intp] | None:
        """Where each of the file's rows is in the Hugging Face tensor, None where all are in place: rows of a
        head are interleaved in the file (0, d/2, 1, d/2 + 1, …)."""
        heads = self._interleaved_heads(name)
        return None if heads is None else np.arange(rows).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)

    def _interleaved_heads(self, name: str) -> int | None:
        """How many heads a tensor has whose rows are interleaved in the file."""
        for part, heads in (("q", self.spec.num_heads), ("k", self.spec.num_kv_heads)):
            if self._family.interleaved and f".self_attn.{part}_proj." in name:
                return heads
        return None

    def _rope_factors(self) -> NDArray[np.float32] | None:
        entry = self._tensors.get(_ROPE_FACTORS)
        if entry is None:
            return None
        if entry.type.name not in PLAIN_TYPES or entry.nbytes > _LONGEST_VECTOR:
            raise ModelFormatError(f"{self.origin}: tensor {_ROPE_FACTORS!r} is not a short float vector")
        return self._decode(entry)

    def _check_tensors(self) -> None:
        """Exactly the tensors of the spec, each of its shape and of a type that is read."""
        shapes = self.spec.tensors()
        self._names = frozenset(shapes)
        layer_names = self._family.layer_names
        expected = {gguf_name(name, layer_names): (name, shape) for name, shape in shapes.items()}
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
        rows = values.reshape(-1, entry.shape[-1])
        for part, raw in self._chunks(entry):
            rows[part] = self._float32(entry, raw)
        return values

    def _chunks(self, entry: GgufTensor) -> Iterator[tuple[slice, NDArray[np.uint8]]]:
        """The file's rows of a tensor, [rows, bytes] as they are; a vector is one row."""
        count = math.prod(entry.shape[:-1])
        step = max(1, _CHUNK_ELEMENTS // entry.shape[-1])
        for first in range(0, count, step):
            part = slice(first, min(first + step, count))
            yield part, self._read_rows(entry, part.start, part.stop)

    def _read_rows(self, entry: GgufTensor, begin: int, end: int) -> NDArray[np.uint8]:
        row_bytes = _row_bytes(entry)
        raw = np.empty((end - begin, row_bytes), np.uint8)
        read_bytes(self._fd, entry.offset + begin * row_bytes, raw, self.origin)
        return raw

    def _float32(self, entry: GgufTensor, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
        values = _to_float32(raw, entry.type.name)
        if not np.isfinite(values).all():
            raise ModelFormatError(f"{self.origin}: tensor {entry.name!r} holds a NaN or an infinity")
        return values


def _row_bytes(entry: GgufTensor) -> int:
    return entry.shape[-1] // entry.type.elements * entry.type.nbytes


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
    # A damaged block's scale overflows to the infinity that the caller reports. As one row: the package goes
    # through 16 rows at a time, which are too few to be worth a call each.
    with np.errstate(all="ignore"):
        decoded: NDArray[np.float32] = dequantize(raw.reshape(1, -1), GGMLQuantizationType[kind])
    return decoded.reshape(len(raw), -1)
