"""A process's resident memory, sampled from outside: what it holds at each moment, and its peak so far."""

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

INTERVAL = 0.005  # seconds


@dataclass(frozen=True)
class Sample:
    """Bytes, at `seconds` after the launch."""

    seconds: float
    resident: int
    anonymous: int  # of these, what no file holds
    peak: int  # the most resident at once, up to now


@dataclass(frozen=True)
class Trace:
    """A process from its launch to its end. `marks` are the lines that it wrote to standard output, by when
    they were seen."""

    samples: list[Sample]
    marks: list[tuple[float, str]]

    def peak(self, begin: str | None = None, end: str | None = None) -> int:
        """The most bytes resident between two marks: what the system counted by `end` where `begin` is None,
        else the highest sample."""
        first = -1.0 if begin is None else self._when(begin)
        last = self.samples[-1].seconds if end is None else self._when(end)
        within = [sample for sample in self.samples if first <= sample.seconds <= last]
        return max(sample.peak if begin is None else sample.resident for sample in within)

    def _when(self, mark: str) -> float:
        return next(seconds for seconds, line in self.marks if line == mark)


def trace(command: Sequence[str], env: Mapping[str, str] | None = None) -> Trace:
    """Runs a command that writes little to standard output. Raises `RuntimeError` with what it wrote on
    standard error where it fails."""
    started = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        os.set_blocking(child.stdout.fileno(), False)
        samples, marks, text = [], [], b""
        while child.poll() is None:
            text += child.stdout.read() or b""
            *lines, text = text.split(b"\n")
            now = time.monotonic() - started
            marks += [(now, line.decode()) for line in lines]
            if (sample := _sample(child.pid, now)) is not None:
                samples.append(sample)
            time.sleep(INTERVAL)
        if child.returncode:
            raise RuntimeError(child.stderr.read().decode())
    return Trace(samples, marks)


def _sample(pid: int, now: float) -> Sample | None:
    """None while the process has no memory of its own, or no more."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    fields = {line.split(":")[0]: line.split() for line in status.splitlines()}
    if "VmRSS" not in fields:
        return None
    resident, anonymous, peak = (1024 * int(fields[x][1]) for x in ("VmRSS", "RssAnon", "VmHWM"))
    return Sample(now, resident, anonymous, peak)
