"""The C++ kernels of this installation: which instruction set they use here, and what it can do at most."""

import os
import time
from collections.abc import Callable
from typing import Any

from ..errors import DoesNotFitError, MissingDependencyError, SettingError
from ..records import dataclass
from .bandwidth import Bandwidth, ReadRate
from .cpu import read_cpu

ISA_VARIABLE = "NYBBLE_ISA"

# Two buffers are read that no cache holds, the smaller one still in part; where the sizes of caches can't be
# read, these are enough for most.
_SMALLEST_BUFFER, _LARGEST_BUFFER = 64 << 20, 1 << 30
_SMALL, _LARGE = 2, 16  # times the largest cache
_SECONDS = 0.12  # of passes, for each limit
_SHORTEST_PASS = 0.002  # seconds: well over what starting the threads takes


@dataclass(frozen=True)
class MachineLimits:
    """What this machine was measured to do at most, with so many threads of one instruction set."""

    threads: int
    isa: str
    small_read: ReadRate  # of a buffer little larger than the last cache
    large_read: ReadRate  # of a much larger one
    integer_rate: float  # operations per second of the int8 dot product; multiply and add are two

    @property
    def reads(self) -> tuple[ReadRate, ...]:
        """What was measured: both, or the one there is."""
        both = (self.small_read, self.large_read)
        return both if self.large_read.bytes > self.small_read.bytes else both[1:]

    @property
    def bandwidth(self) -> Bandwidth:
        return Bandwidth.between(self.small_read, self.large_read)


def kernel_sets() -> tuple[str, ...] | None:
    """The instruction sets whose kernels are built and run on this CPU, best first; None where this
    installation has no kernels."""
    try:
        from .. import _kernels
    except ImportError:
        return None
    return tuple(_kernels.supported_kernels())


def choose_isa(asked: str = "") -> str:
    """The instruction set to run: `asked`, else the environment variable NYBBLE_ISA, else the best that this
    CPU has. Raises `SettingError` for one that is not there, `MissingDependencyError` without kernels."""
    sets = kernel_sets()
    if sets is None:
        raise MissingDependencyError(
            "executor 'cpu' needs the C++ kernels, which this installation was built without; "
            "reinstall nybble where a C++ compiler is found, or use executor 'ort'"
        )
    forced = os.environ.get(ISA_VARIABLE, "")
    name, found = ("isa", asked) if asked else (ISA_VARIABLE, forced)
    if found and found not in sets:
        raise SettingError(f"{name} is {found!r}; this CPU has kernels for {', '.join(sets)}")
    return found or sets[0]


def measure_limits(threads: int, isa: str = "", memory: int | None = None) -> MachineLimits:
    """Measures for about half a second, with nothing else running: bandwidth of reading two buffers that
    no cache holds, and the rate of `isa`'s dot product on registers, the best of several passes each. Takes
    no more `memory` than so many bytes, by default 16 times the largest cache.

    Raises `SettingError` for threads or an instruction set that are not there, `DoesNotFitError` where the
    buffer finds no memory, `MissingDependencyError` without kernels.
    """
    chosen = choose_isa(isa)
    from .. import _kernels

    try:
        loop = _kernels.DotLoop(threads, chosen)
        rate = _integer_rate(loop)
        small_size, large_size = read_buffers(memory)
        small = _read_rate(threads, small_size)
        large = small if large_size == small_size else _read_rate(threads, large_size)
    except ValueError as error:
        raise SettingError(str(error)) from None
    except MemoryError:
        raise DoesNotFitError("the buffer to measure read bandwidth with finds no memory") from None
    return MachineLimits(threads, chosen, small, large, rate)


def _read_rate(threads: int, size: int) -> ReadRate:
    from .. import _kernels

    memory = _kernels.MemoryRead(threads, size)
    return ReadRate(memory.bytes, memory.bytes / _best(memory.run))


def _integer_rate(loop: Any) -> float:
    rounds = 1024
    # Twice, since another process can stretch one.
    while min(loop.run(rounds), loop.run(rounds)) < _SHORTEST_PASS:
        rounds *= 2
    return float(rounds * loop.operations / _best(lambda: float(loop.run(rounds))))


def _best(run: Callable[[], float]) -> float:
    """The shortest of several passes, in seconds."""
    end = time.monotonic() + _SECONDS
    shortest = run()
    while time.monotonic() < end:
        shortest = min(shortest, run())
    return shortest


def read_buffers(memory: int | None = None) -> tuple[int, int]:
    """Bytes of the buffers that `measure_limits` reads one after the other, each at most `memory`. Where the
    larger one would not be twice the other, there is one."""
    largest = max((cache.bytes for cache in read_cpu().caches or ()), default=0)
    most = _LARGEST_BUFFER if memory is None else min(memory, _LARGEST_BUFFER)
    small, large = (min(max(_SMALLEST_BUFFER, times * largest), most) for times in (_SMALL, _LARGE))
    return small, large if large >= 2 * small else small
