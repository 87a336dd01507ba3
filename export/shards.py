"""`Shards`: the safetensors files of a checkpoint, one or many, as one set of tensors."""

import weakref
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelFormatError, UnsupportedModelError
from ..models.config_reader import read_json_object, shown
from ..models.hf_folder import INDEX_FILE, MAX_INDEX_BYTES, SINGLE_FILE, checked_weight_map
from ..models.safetensors_file import SafetensorsFile

FLOATS = ("F16", "BF16", "F32")


class Shards:
    """The opened files of a folder: `model.safetensors`, or those that its index names. Headers have been
    checked; tensors are read when asked for and not kept. To be closed."""

    def __init__(self, folder: Path) -> None:
        """Raises `ModelFormatError`, naming the file or tensor."""
        self.folder = folder
        self._files = _open(folder)
        # An executor that reads the weights once need not say when it is done.
        self._close = weakref.finalize(self, _close_all, list(self._files.values()))

    def __contains__(self, name: str) -> bool:
        return name in self._files

    @property
    def paths(self) -> list[Path]:
        """The files, by name."""
        return sorted({file.path for file in self._files.values()})

    def file(self, name: str) -> SafetensorsFile:
        """The file that holds a tensor. Raises `ModelFormatError` where none does."""
        file = self._files.get(name)
        if file is None:
            raise ModelFormatError(f"{self.folder}: tensor {shown(name)} is missing from the checkpoint")
        return file

    def raw(self, name: str) -> NDArray[Any]:
        return self.file(name).raw(name)

    def columns(self, name: str, begin: int, end: int) -> NDArray[Any]:
        return self.file(name).columns(name, begin, end)

    def floats(self, name: str, rows: tuple[int, int] | None = None) -> NDArray[np.float32]:
        """A float tensor, or rows of it, in float32. Raises `ModelFormatError` for values that are not
        finite."""
        file = self.file(name)
        values = file.float32(name, rows)
        # Both are NaN if one value is; unlike isfinite over the array, they take no memory.
        if not (np.isfinite(values.min()) and np.isfinite(values.max())):
            raise ModelFormatError(f"{file.where}: tensor {shown(name)} holds NaN or infinity")
        return values

    def check(self, name: str, dtypes: tuple[str, ...], shape: tuple[int, ...], why: str = "") -> None:
        """Raises `ModelFormatError` where a tensor is missing or has another shape; `why` says what that
        follows from. `UnsupportedModelError` where its dtype is none of these."""
        file = self.file(name)
        info = file.tensors[name]
        if info.shape != shape:
            raise ModelFormatError(
                f"{file.where}: tensor {shown(name)} is {list(info.shape)}, expected {list(shape)}{why}"
            )
        if info.dtype not in dtypes:
            raise UnsupportedModelError(
                f"{file.where}: tensor {shown(name)} is {info.dtype}, expected {' or '.join(dtypes)}"
            )

    def close(self) -> None:
        self._close()


def _open(folder: Path) -> dict[str, SafetensorsFile]:
    """Tensor name to opened file."""
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.exists():
        file = SafetensorsFile(single)
        return dict.fromkeys(file.tensors, file)
    if not index.exists():
        raise ModelFormatError(f"{folder}: has neither {SINGLE_FILE} nor {INDEX_FILE}")
    shard_of = checked_weight_map(read_json_object(index, str(index), MAX_INDEX_BYTES), index)
    files: dict[str, SafetensorsFile] = {}
    try:
        for name in sorted(set(shard_of.values())):
            files[name] = SafetensorsFile(folder / name)
        for tensor, name in shard_of.items():
            if tensor not in files[name].tensors:
                raise ModelFormatError(
                    f"{folder / name}: tensor {shown(tensor)} is missing, but {INDEX_FILE} says it is there"
                )
    except BaseException:
        _close_all(list(files.values()))
        raise
    return {tensor: files[name] for tensor, name in shard_of.items()}


def _close_all(files: list[SafetensorsFile]) -> None:
    for file in files:
        file.close()
