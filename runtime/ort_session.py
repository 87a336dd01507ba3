"""ONNX Runtime itself: found, checked, and asked for sessions. Nothing else in Nybble imports it.

Importing this module raises `MissingDependencyError` where ONNX Runtime is missing, or where two packages
have overwritten each other's files.
"""

import importlib.metadata
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ExecutorError, MissingDependencyError, SettingError

PREFERRED = ("CUDAExecutionProvider", "CPUExecutionProvider")
OLDEST = (1, 28)  # 1.22 cannot load the graph; up to 1.27, a token that sees nothing does not get zeros
PACKAGES = ("onnxruntime", "onnxruntime-gpu")


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _load() -> Any:
    if all(_installed(name) for name in PACKAGES):
        raise MissingDependencyError(
            "onnxruntime and onnxruntime-gpu are both installed and overwrite each other's files; "
            "uninstall both, then install nybble[onnx] or nybble[cuda]"
        )
    try:
        import onnxruntime
    except ImportError:
        raise MissingDependencyError(
            "OrtExecutor needs onnxruntime; pip install 'nybble[onnx]', or 'nybble[cuda]' for a CUDA GPU"
        ) from None
    found = tuple(int(part) for part in onnxruntime.__version__.split(".")[:2])
    if found < OLDEST:
        raise MissingDependencyError(
            f"OrtExecutor needs onnxruntime {OLDEST[0]}.{OLDEST[1]} or newer; "
            f"{onnxruntime.__version__} is installed"
        )
    return onnxruntime


ort = _load()


def choose_providers(
    providers: Sequence[str | tuple[str, Mapping[str, str]]] | None,
) -> list[tuple[str, dict[str, str]]]:
    """The execution providers to use, best first, with their options: those asked for, or CUDA where ONNX
    Runtime offers it; the CPU is always there, for operators that the others lack. Raises `SettingError` for
    one not offered."""
    available = ort.get_available_providers()
    if providers is None:
        providers = [name for name in PREFERRED if name in available]
    chosen: dict[str, dict[str, str]] = {}
    for provider in [*providers, "CPUExecutionProvider"]:
        name, options = (provider, {}) if isinstance(provider, str) else provider
        if name not in available:
            raise SettingError(f"providers has {name!r}; this ONNX Runtime offers {', '.join(available)}")
        chosen.setdefault(name, dict(options))
    return list(chosen.items())


def device_of(providers: Sequence[str]) -> str:
    """Where ONNX Runtime keeps an OrtValue for the first provider: "cuda" or "cpu"."""
    return "cuda" if providers[0] == "CUDAExecutionProvider" else "cpu"


def make_session(
    model: bytes,
    *,
    providers: Sequence[tuple[str, dict[str, str]]],
    threads: int | None,
    folder: str | None = None,
    tensors: Mapping[str, NDArray[Any]] | None = None,
    what: str = "the graph",
) -> Any:
    """A session for a serialized model, whose weights lie in `folder` (mapped from the files) or are given as
    `tensors`, which must then outlive it. `threads` None is as many as this process may use. Raises
    `ExecutorError` naming `what`, also for options that a provider refuses."""
    options = ort.SessionOptions()
    options.log_severity_level = 4  # what goes wrong is raised; ONNX Runtime would also print it
    options.intra_op_num_threads = threads or len(os.sched_getaffinity(0))
    options.inter_op_num_threads = 1
    options.enable_mem_pattern = False  # patterns are kept per input shape, and shapes never repeat here
    # Threads spin inside a run, where the next operator follows at once, and sleep between runs.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    if folder is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
    if tensors:
        element = {np.dtype(np.float32): 1, np.dtype(np.uint8): 2, np.dtype(np.int32): 6}
        values = [
            ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, element[array.dtype])
            for array in tensors.values()
        ]
        options.add_external_initializers(list(tensors), values)
    try:
        # Without the fallback, which would print the error and run on the CPU.
        return ort.InferenceSession(model, options, providers=list(providers), enable_fallback=0)
    except Exception as error:  # ONNX Runtime's own exception types, of no common base
        raise ExecutorError(f"ONNX Runtime refused {what}: {first_line(error)}") from None


def first_line(error: BaseException) -> str:
    """An error's message on one line, without ONNX Runtime's source paths in front."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:400]
