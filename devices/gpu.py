"""NVIDIA GPUs through NVML, the driver's own library, by ctypes: no package is needed.

Names and types are those of https://docs.nvidia.com/deploy/nvml-api/.
"""

import ctypes
from types import TracebackType
from typing import Self

from ..records import dataclass

LIBRARY = "libnvidia-ml.so.1"
_NAME_BYTES = 96  # NVML_DEVICE_NAME_V2_BUFFER_SIZE


@dataclass(frozen=True)
class Gpu:
    """One GPU; None is what its driver doesn't tell."""

    name: str
    memory_total: int | None  # bytes
    memory_free: int | None
    watts: float | None  # drawn now


class NvmlError(Exception):
    """NVML is not here, or refused a call; the text says which."""


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class Nvml:
    """The library, initialized; a context manager that ends it. Raises `NvmlError`."""

    def __init__(self, library: str = LIBRARY) -> None:
        try:
            self._library = ctypes.CDLL(library)
        except OSError:
            raise NvmlError(f"{library} is not there, so neither is an NVIDIA driver") from None
        self._call("nvmlInit_v2")

    def close(self) -> None:
        self._call("nvmlShutdown")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def count(self) -> int:
        """How many GPUs there are."""
        number = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(number))
        return number.value

    def gpu(self, index: int) -> Gpu:
        """What one of them is, and has free now."""
        handle, name, memory = self._handle(index), ctypes.create_string_buffer(_NAME_BYTES), _Memory()
        self._call("nvmlDeviceGetName", handle, name, ctypes.c_uint(_NAME_BYTES))
        sizes: tuple[int | None, int | None] = (None, None)
        try:
            self._call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
            sizes = (memory.total, memory.free)
        except NvmlError:
            pass  # a GPU that shares the host's memory has none of its own
        try:
            watts = self.watts(index)
        except NvmlError:
            watts = None
        return Gpu(name.value.decode("utf-8", "replace"), *sizes, watts)

    def watts(self, index: int) -> float:
        """What it draws now."""
        milliwatts = ctypes.c_uint()
        self._call("nvmlDeviceGetPowerUsage", self._handle(index), ctypes.byref(milliwatts))
        return milliwatts.value / 1e3

    def joules(self, index: int) -> float:
        """What it drew since the driver was loaded. Raises `NvmlError` for a GPU older than Volta."""
        millijoules = ctypes.c_ulonglong()
        self._call("nvmlDeviceGetTotalEnergyConsumption", self._handle(index), ctypes.byref(millijoules))
        return millijoules.value / 1e3

    def _handle(self, index: int) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
        return handle

    def _call(self, name: str, *arguments: object) -> None:
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise NvmlError(f"NVML has no {name}") from None
        status = function(*arguments)
        if status != 0:
            raise NvmlError(f"{name} returned {status}")


def read_gpus(notes: list[str], library: str = LIBRARY) -> tuple[Gpu, ...] | None:
    """Every NVIDIA GPU; None, with a line in `notes`, where NVML doesn't tell."""
    try:
        with Nvml(library) as nvml:
            return tuple(nvml.gpu(index) for index in range(nvml.count))
    except NvmlError as error:
        notes.append(f"GPU memory: {error}")
        return None
