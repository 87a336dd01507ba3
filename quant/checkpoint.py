"""What a quantization that was stopped goes on from: its finished layers, and the state after the last.

A folder holds `key.json`, what the run was of; `layer-00012.safetensors`, a layer's results; and
`state-00012.safetensors`, what the next layer begins with. A file appears whole or not at all, and ends with
the SHA-256 of all before it. Layers are written before the state that follows them, so a state that is there
and sound has all its layers.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelFormatError, NybbleError, SettingError
from ..models.config_reader import read_json_object
from ..models.safetensors_file import SafetensorsFile
from ..records import dataclass
from .packing import QuantizedTensor
from .packing_nf4 import AnyQuantized, Nf4Tensor

log = logging.getLogger("nybble")

VERSION = 2
# Work is kept when so much time went into it since it was last kept: little of it is lost, and a model that
# takes less writes nothing.
SAVE_SECONDS = 30.0
KEY_FILE = "key.json"
STATES = f"state-{'[0-9]' * 5}.safetensors"  # a pattern
CHECKSUM = "sha256"
TYPES = {"|u1": "U8", "<f2": "F16", "<f4": "F32", "<f8": "F64", "<i4": "I32", "<i8": "I64"}

Result = AnyQuantized | NDArray[np.float16]


@dataclass(frozen=True, eq=False)
class Kept:
    """What was finished: how many layers, their tensors and errors by name, and the state after them."""

    layers: int
    tensors: dict[str, Result]
    errors: dict[str, float]
    state: dict[str, NDArray[Any]]


def work_folder(out: Path) -> Path:
    """Where the work on an artifact is kept, whose real path is `out`: a hidden folder beside it."""
    return out.with_name(f".{out.name}.nybble-work")


class Checkpoint:
    """The folder of one run, made when there is something to keep. Close it, or use it in a `with`; `finish`
    when the results are safe.

    Where nothing can be written, or another process works there, nothing is kept, and the log says so once.
    """

    def __init__(self, folder: Path | None, *, resume: bool = False) -> None:
        """Without a folder nothing is kept. With `resume`, `load` gives what an earlier run kept there."""
        self._folder, self._resume = folder, resume
        self._keeps = folder is not None
        self._key: dict[str, Any] = {}
        self._pending: dict[int, dict[str, NDArray[Any]]] = {}
        self._last_save = time.monotonic()
        self._lock: int | None = None
        if folder is not None and os.path.lexists(folder):
            try:
                self._lock = _locked(folder)
            except OSError as error:
                self._give_up(error)

    def load(self, key: Mapping[str, Any]) -> Kept | None:
        """What an earlier run finished; None where there is nothing that is sound. Without `resume` what is
        there is removed. To be called before `save`.

        `key` is what the results depend on, in values that JSON has. Raises `SettingError` for work of
        another run, naming what is not the same."""
        self._key = json.loads(json.dumps({"version": VERSION, **key}))
        if self._folder is None or self._lock is None:
            return None
        try:
            if not self._resume or not (self._folder / KEY_FILE).exists():
                _clear(self._folder)
                return None
        except OSError as error:
            self._give_up(error)
            return None
        _check_key(self._folder, self._key)
        for last in sorted((int(path.stem[6:]) for path in self._folder.glob(STATES)), reverse=True):
            try:
                return _read_kept(self._folder, last)
            except (NybbleError, OSError, KeyError, TypeError, ValueError) as error:
                log.warning("%s: the work kept after layer %d is not used: %s", self._folder, last, error)
        return None

    def save(
        self,
        layer: int,
        tensors: Mapping[str, Result],
        errors: Mapping[str, float],
        state: Mapping[str, NDArray[Any]],
        *,
        now: bool = False,
    ) -> None:
        """Takes a finished layer's results, and the state after it, of which nothing is held beyond the call.
        They are on the disk when this returns, if it was time or has to be `now`."""
        if self._folder is None or not self._keeps:
            return
        self._pending[layer] = _flat(tensors, errors)
        if not now and time.monotonic() - self._last_save < SAVE_SECONDS:
            return
        try:
            self._write(self._folder, layer, state)
        except OSError as error:
            self._give_up(error)
            return
        self._pending.clear()
        self._last_save = time.monotonic()

    def finish(self) -> None:
        """Removes what is kept, unless another process works there."""
        if self._folder is not None and self._lock is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self.close()

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        self._pending.clear()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, folder: Path, layer: int, state: Mapping[str, NDArray[Any]]) -> None:
        if self._lock is None:
            folder.mkdir(exist_ok=True)
            self._lock = _locked(folder)
            _clear(folder)  # of a run that came and went since this one began
        if not (folder / KEY_FILE).exists():
            _replace(folder / KEY_FILE, [json.dumps(self._key, indent=2).encode()])
        for number, arrays in self._pending.items():
            _write_arrays(folder / _layer_file(number), arrays)
        newest = folder / _state_file(layer)
        _write_arrays(newest, state)
        for path in folder.glob(STATES):
            if path != newest:
                path.unlink()

    def _give_up(self, error: OSError) -> None:
        """Keeps nothing more. What was kept before stays, for a run with `resume`."""
        busy = isinstance(error, BlockingIOError)
        why = "another process works there" if busy else error.strerror or error
        log.warning("%s: work is not kept: %s", self._folder, why)
        self._keeps = False
        if self._folder is not None and self._lock is not None:
            with contextlib.suppress(OSError):
                for layer in self._pending:  # the state first: one that is there has all its layers
                    (self._folder / _state_file(layer)).unlink(missing_ok=True)
                    (self._folder / _layer_file(layer)).unlink(missing_ok=True)
            if not any(self._folder.glob(STATES)):
                shutil.rmtree(self._folder, ignore_errors=True)
        self._pending.clear()


def _layer_file(layer: int) -> str:
    return f"layer-{layer:05d}.safetensors"


def _state_file(layer: int) -> str:
    return f"state-{layer:05d}.safetensors"


def discard_finished(folder: Path, result: Path) -> None:
    """Removes what is kept there if `result`, a file that is written after all of it, is newer: the run was
    killed when its work was done. What another process works on stays."""
    with contextlib.suppress(OSError):
        lock = _locked(folder)
        try:
            times = [path.lstat().st_mtime_ns for path in folder.iterdir()]
            if max(times, default=0) < result.stat().st_mtime_ns:
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


def _locked(folder: Path) -> int:
    """A descriptor of the folder that no other process has a lock on. Raises `OSError`."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _check_key(folder: Path, key: Mapping[str, Any]) -> None:
    path = folder / KEY_FILE
    found = read_json_object(path, str(path))
    differing = [name for name in key if found.get(name) != key[name]]
    if differing:
        raise SettingError(
            f"{folder}: holds work of a run with another {' and '.join(differing)}; repeat that run's "
            "settings, or begin anew without resume"
        )


def _read_kept(folder: Path, last: int) -> Kept:
    kept = Kept(last + 1, {}, {}, _read_arrays(folder / _state_file(last)))
    for layer in range(last + 1):
        _unflatten(_read_arrays(folder / _layer_file(layer)), kept.tensors, kept.errors)
    return kept


def _flat(tensors: Mapping[str, Result], errors: Mapping[str, float]) -> dict[str, NDArray[Any]]:
    """Arrays by name: a tensor's own, or those of its fields; numbers as arrays of one."""
    arrays: dict[str, NDArray[Any]] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, np.ndarray):
            arrays[name] = tensor
            continue
        for field in fields(tensor):
            value = getattr(tensor, field.name)
            if value is not None:
                arrays[f"{name}/{field.name}"] = value if isinstance(value, np.ndarray) else np.array([value])
    return arrays | {f"{name}/error": np.array([error]) for name, error in errors.items()}


def _unflatten(
    arrays: Mapping[str, NDArray[Any]], tensors: dict[str, Result], errors: dict[str, float]
) -> None:
    """The inverse, into the two dictionaries."""
    parts: dict[str, dict[str, Any]] = {}
    numbers = {field.name for field in fields(QuantizedTensor) if field.type in (int, "int")}
    for key, array in arrays.items():
        name, _, field = key.partition("/")
        if not field:
            tensors[name] = array
        elif field == "error":
            errors[name] = float(array[0])
        else:
            parts.setdefault(name, {})[field] = int(array[0]) if field in numbers else array
    for name, values in parts.items():
        # One in NF4 has no bits of its own.
        nf4 = "bits" not in values
        tensors[name] = Nf4Tensor(**values) if nf4 else QuantizedTensor(**{"zeros": None, **values})


def _write_arrays(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """A safetensors file whose last tensor is the SHA-256 of all bytes before it."""
    little = {
        name: np.ascontiguousarray(array, array.dtype.newbyteorder("<")) for name, array in arrays.items()
    }
    header: dict[str, Any] = {}
    end = 0
    for name, array in little.items():
        begin, end = end, end + array.nbytes
        header[name] = {
            "dtype": TYPES[array.dtype.str], "shape": array.shape, "data_offsets": [begin, end]
        }  # fmt: skip
    header[CHECKSUM] = {"dtype": "U8", "shape": [32], "data_offsets": [end, end + 32]}
    text = json.dumps(header).encode()
    _replace(
        path,
        [len(text).to_bytes(8, "little"), text, *(a.reshape(-1).view(np.uint8) for a in little.values())],
        True,
    )


def _replace(path: Path, parts: list[Any], checksum: bool = False) -> None:
    """Writes the parts to a file that appears whole or not at all, flushed to the disk."""
    temporary, digest = path.with_suffix(".tmp"), hashlib.sha256()
    try:
        with open(temporary, "wb") as file:
            for part in parts:
                file.write(part)
                digest.update(part)
            if checksum:
                file.write(digest.digest())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of a file, its checksum verified. Raises `ModelFormatError`, and `OSError`."""
    with SafetensorsFile(path) as file:
        arrays = {name: file.raw(name) for name in file.tensors}
        expected = arrays.pop(CHECKSUM, None)
        size = os.stat(path).st_size
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        left = size - 32
        while left > 0 and (chunk := stream.read(min(left, 1 << 20))):
            digest.update(chunk)
            left -= len(chunk)
    if expected is None or expected.tobytes() != digest.digest():
        raise ModelFormatError(f"{path.name}: its checksum is another; it was changed")
    return arrays
