"""Writes safetensors files whose sizes are known beforehand, one tensor at a time.

The format (https://github.com/huggingface/safetensors): eight bytes with the header's length, a JSON header
of names, dtypes, shapes and offsets, then the tensors without gaps.
"""

import errno
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import OutputError
from ..records import dataclass

SHARD_LIMIT = 4 << 30  # bytes
INDEX_NAME = "model.safetensors.index.json"

_DTYPES: dict[str, np.dtype[Any]] = {
    "I32": np.dtype("<i4"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
}  # fmt: skip


@dataclass(frozen=True)
class TensorLayout:
    """What a tensor will be: `dtype` is safetensors' name."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return _DTYPES[self.dtype].itemsize * math.prod(self.shape)


@dataclass(frozen=True)
class ShardPlan:
    """One file: its name and its tensors, whose order in the file is its own."""

    file_name: str
    tensors: tuple[TensorLayout, ...]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)


def plan_shards(units: Iterable[tuple[TensorLayout, ...]], limit: int) -> tuple[ShardPlan, ...]:
    """Distributes units (tensors that stay in one file) over files of at most `limit` bytes each, or one unit
    if that is larger. One file is `model.safetensors`, more are `model-00001-of-00003.safetensors` and on."""
    shards: list[list[TensorLayout]] = [[]]
    filled = 0
    for unit in units:
        size = sum(t.nbytes for t in unit)
        if filled and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].extend(unit)
        filled += size
    if len(shards) == 1:
        return (ShardPlan("model.safetensors", tuple(shards[0])),)
    name = "model-{:05d}-of-{:05d}.safetensors"
    return tuple(ShardPlan(name.format(i + 1, len(shards)), tuple(s)) for i, s in enumerate(shards))


def index_json(shards: Iterable[ShardPlan]) -> dict[str, Any]:
    """The content of `model.safetensors.index.json`."""
    shards = tuple(shards)
    weight_map = {t.name: s.file_name for s in shards for t in s.tensors}
    return {
        "metadata": {"total_size": sum(s.nbytes for s in shards)},
        "weight_map": dict(sorted(weight_map.items())),
    }


class ShardWriter:
    """One file being written: `put` each of the plan's tensors once, in any order, then `close`.

    In the file tensors of larger items come first, so that each is aligned to its own item size.
    """

    def __init__(self, folder: Path, plan: ShardPlan) -> None:
        self._waiting: dict[str, tuple[TensorLayout, int]] = {}
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for tensor in sorted(plan.tensors, key=lambda t: -_DTYPES[t.dtype].itemsize):
            header[tensor.name] = {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "data_offsets": [offset, offset + tensor.nbytes],
            }
            self._waiting[tensor.name] = (tensor, offset)
            offset += tensor.nbytes
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self._start = 8 + len(text)
        self._file = open(folder / plan.file_name, "wb")  # noqa: SIM115  (closed by close)
        try:
            self._file.write(len(text).to_bytes(8, "little") + text)
            # Reserving the space now meets a full disk before the work, not after it.
            if hasattr(os, "posix_fallocate"):
                _reserve(self._file.fileno(), self._start + offset)
        except BaseException:
            self._file.close()
            raise

    def put(self, name: str, array: NDArray[Any]) -> int:
        """Writes one tensor at its place; its size in bytes. `OutputError` if it is not as planned."""
        tensor, offset = self._waiting.pop(name)
        if array.shape != tensor.shape or array.dtype != _DTYPES[tensor.dtype]:
            found = f"{array.dtype} {list(array.shape)}"
            raise OutputError(f"{name}: is {found}; expected {tensor.dtype} {list(tensor.shape)}")
        self._file.seek(self._start + offset)
        self._file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return tensor.nbytes

    def close(self) -> None:
        """Closes the file; `OutputError` if a tensor of the plan was never put."""
        self._file.close()
        if self._waiting:
            raise OutputError(f"{self._file.name}: tensor {next(iter(self._waiting))} was not written")

    def abandon(self) -> None:
        """Closes the file as it is, after an error."""
        self._file.close()


def write_shards(
    folder: Path,
    layout: Mapping[str, tuple[TensorLayout, ...]],
    parts_of: Callable[[str], Mapping[str, NDArray[Any]]],
    limit: int,
    advance: Callable[[int], None],
) -> None:
    """Writes a checkpoint tensor by tensor into files of at most `limit` bytes, and the index where there are
    several. `layout` has what is stored of each of a model's tensors, `parts_of` gives it, and `advance` is
    told the bytes of each part when it is written. Raises `OutputError` for what is not as planned, `OSError`
    from the disk."""
    shards = plan_shards(layout.values(), limit)
    source = {part.name: name for name, parts in layout.items() for part in parts}
    for shard in shards:
        writer = ShardWriter(folder, shard)
        try:
            for name in dict.fromkeys(source[t.name] for t in shard.tensors):
                for part, array in parts_of(name).items():
                    advance(writer.put(part, array))
            writer.close()
        except BaseException:
            writer.abandon()
            raise
    if len(shards) > 1:
        (folder / INDEX_NAME).write_text(json.dumps(index_json(shards), indent=2) + "\n", encoding="utf-8")


def _reserve(descriptor: int, size: int) -> None:
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        # Not every file system and C library can.
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file's bytes, hexadecimal, read in pieces."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
