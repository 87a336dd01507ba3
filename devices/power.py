"""`PowerMeter`: the energy that was drawn while something ran."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from .gpu import Nvml, NvmlError
from .power_sources import EnergyCounter, PowerGauge, Source, find_sources, gpu_source

SAMPLE_SECONDS = 0.05  # between two looks at a gauge


@dataclass
class Energy:
    """What was drawn in a stretch of time. `joules` is None where the system doesn't tell, or a source
    stopped telling."""

    seconds: float = 0.0
    joules: float | None = None

    @property
    def watts(self) -> float | None:
        """The mean power."""
        return self.joules / self.seconds if self.joules is not None and self.seconds else None


class PowerMeter:
    """Adds up what all sources of this system draw: everything that runs on it, idle power included. A
    context manager where `gpus`, NVIDIA's, count as well."""

    def __init__(self, root: Path = Path("/"), *, gpus: bool = False) -> None:
        found, self._notes = find_sources(root)
        self._sources: list[Source] = list(found)
        self._open = ExitStack()
        if gpus:
            try:
                nvml = self._open.enter_context(Nvml())
                self._sources += [gpu_source(nvml, index) for index in range(nvml.count)]
            except NvmlError as error:
                self._notes.append(str(error))

    @property
    def sources(self) -> tuple[str, ...]:
        """Their names; none where nothing can be read."""
        return tuple(source.name for source in self._sources)

    @property
    def note(self) -> str:
        """Why what isn't among `sources` isn't; empty where nothing is missed."""
        return "; ".join(self._notes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.close()

    @contextmanager
    def measure(self) -> Iterator[Energy]:
        """Yields the energy of the block, which is known when it has ended."""
        energy = Energy()
        counters = [source for source in self._sources if isinstance(source, EnergyCounter)]
        gauges = [source for source in self._sources if isinstance(source, PowerGauge)]
        sampler = _Sampler(gauges) if gauges else None
        before = _read(counters)
        start = time.perf_counter()
        try:
            yield energy
        finally:
            energy.seconds = time.perf_counter() - start
            after = _read(counters)
            sampled = sampler.stop() if sampler is not None else 0.0
        if self._sources and before is not None and after is not None and sampled is not None:
            parts = [_between(c, b, a) for c, b, a in zip(counters, before, after, strict=True)]
            known = [part for part in parts if part is not None]
            energy.joules = sum(known) + sampled if len(known) == len(parts) else None


class _Sampler:
    """A thread that looks at gauges and adds up power over time."""

    def __init__(self, gauges: list[PowerGauge]) -> None:
        self._gauges = gauges
        self._joules: float | None = 0.0
        self._watts, self._at = self._look(), time.perf_counter()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nybble-power", daemon=True)
        self._thread.start()

    def stop(self) -> float | None:
        """Joules since it was made; None where a gauge could not be read."""
        self._ended.set()
        self._thread.join()
        self._add()
        return self._joules

    def _run(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            self._add()

    def _add(self) -> None:
        watts, now = self._look(), time.perf_counter()
        if watts is None or self._watts is None or self._joules is None:
            self._joules = None
        else:
            self._joules += (watts + self._watts) / 2 * (now - self._at)
        self._watts, self._at = watts, now

    def _look(self) -> float | None:
        try:
            return sum(gauge.watts() for gauge in self._gauges)
        except (OSError, ValueError, NvmlError):
            return None


def _read(counters: list[EnergyCounter]) -> list[float] | None:
    try:
        return [counter.joules() for counter in counters]
    except (OSError, ValueError, NvmlError):
        return None


def _between(counter: EnergyCounter, before: float, after: float) -> float | None:
    """A counter that went down has started again."""
    if after >= before:
        return after - before
    return None if counter.range is None else after - before + counter.range
