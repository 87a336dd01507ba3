"""`tune`: the settings that suit a model on this machine, found by running it with others."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from .devices import DeviceProfile, Machine, probe, resolve_device, save_tuned
from .errors import SettingError
from .loading import choose_executor, choose_kv_dtype
from .records import dataclass
from .runnable import open_runnable
from .runtime.executor import KvDtype
from .workload import GOALS, Goal, Measurement, Settings, Workload

Report = Callable[[str, int, int], None]

# Of all settings of a stage, interleaved, since a machine's speed drifts. A single run may have been held up
# by another process for any time.
MIN_ROUNDS, MAX_ROUNDS = 2, 9
EXPECTED_RUNS = 30  # of a whole search, by which the workload is sized
SMALLEST_PROMPT, SMALLEST_ANSWER, LARGEST_SCALE = 64, 8, 8
TOKEN_BUDGETS = (256, 128, 64, 1024)  # beside the device's own
# By how much figures may differ and count as equal.
TIME_TOLERANCE, MEMORY_TOLERANCE = 0.03, 0.01


@dataclass(frozen=True)
class Trial:
    """Settings, and what was measured with them: medians, of two runs the better one."""

    settings: Settings
    runs: tuple[Measurement, ...]

    @property
    def seconds(self) -> float:
        return statistics.median_low(run.seconds for run in self.runs)

    @property
    def first_token(self) -> float:
        return statistics.median_low(run.first_token for run in self.runs)

    @property
    def peak_bytes(self) -> int | None:
        """Bytes; None where it can't be read."""
        peaks = [run.peak_bytes for run in self.runs if run.peak_bytes is not None]
        return statistics.median_low(peaks) if peaks else None


@dataclass(frozen=True)
class Stage:
    """One setting's candidates, the simplest first, with all others as they were chosen before."""

    setting: str  # a field of `Settings`
    trials: tuple[Trial, ...]
    chosen: Trial


@dataclass(frozen=True)
class Tuning:
    """What was tried and found, and where it is kept."""

    workload: Workload
    stages: tuple[Stage, ...]
    skipped: tuple[str, ...]  # settings that time was too short for
    settings: Settings
    file: Path


def tune(
    path: str | Path,
    goal: Goal = "latency",
    *,
    seconds: float = 120.0,
    any_kv_dtype: bool = False,
    progress: Report | None = None,
) -> Tuning:
    """Runs the model with other threads, token budgets, speculation and, with `any_kv_dtype`, KV types, one
    setting after the other, for about so many seconds and at least twice with every number of threads; and
    keeps what suits the goal best for `LLM`'s device "auto". Tokens never change but with the KV type.

    Raises `SettingError` for a value out of range and where our kernels don't run the model, and what `LLM`
    raises.
    """
    if goal not in GOALS:
        raise SettingError(f"goal is {goal!r}; expected {', '.join(GOALS)}")
    if not 0 < seconds < 1e6:
        raise SettingError(f"time is {seconds}; expected seconds above 0")
    machine = probe(providers=False)
    profile = resolve_device("auto", machine)
    if choose_executor("auto", profile, None) != "cpu":
        raise SettingError(f"{path}: executor 'cpu' is the one that is tuned, and 'auto' is another one here")
    with closing(open_runnable(path, "auto", "cpu")) as model:
        digest, context = model.digest, min(model.spec.max_position, profile.context)
    clock = _Clock(seconds, progress)
    settings = Settings(profile.threads, profile.token_budget, choose_kv_dtype(None, profile, "cpu"), "ngram")
    workload = _size(path, goal, settings, context, seconds)
    kv_dtypes: list[KvDtype] = [settings.kv_dtype, "int8"] if any_kv_dtype else [settings.kv_dtype]
    candidates = _candidates(machine, profile, workload, kv_dtypes)
    stages: list[Stage] = []
    skipped: list[str] = []
    for number, (setting, values) in enumerate(candidates):
        if len(values) < 2:
            continue
        if stages and clock.is_over():
            skipped.append(setting)
            continue
        changed = [_changed(settings, setting, value) for value in values]
        trials = _measure(path, workload, changed, clock.share(len(candidates) - number), clock)
        chosen = choose(trials, goal)
        stages.append(Stage(setting, trials, chosen))
        settings = chosen.settings
    clock.report(ended=True)
    file = save_tuned(_profile(profile, settings, goal, machine, path), digest, machine)
    return Tuning(workload, tuple(stages), tuple(skipped), settings, file)


def choose(trials: Sequence[Trial], goal: Goal) -> Trial:
    """The trial that suits the goal best by its median; of those that are as good, the first, which is the
    simplest. One is as good whose best run comes as near as `TIME_TOLERANCE`: other processes only ever make
    a run slower. For memory the faster one comes before the simpler one, since it costs nothing. Raises
    `SettingError` where memory is asked for and can't be read."""
    left = list(trials)
    if goal == "memory":
        peaks = [trial.peak_bytes for trial in trials]
        known = [peak for peak in peaks if peak is not None]
        if len(known) < len(peaks):
            raise SettingError("goal is 'memory', but peak memory can't be read on this system")
        least = min(known) * (1 + MEMORY_TOLERANCE)
        left = [trial for trial, peak in zip(trials, known, strict=True) if peak <= least]
    fastest = min(trial.seconds for trial in left) * (1 + TIME_TOLERANCE)
    return next(trial for trial in left if min(run.seconds for run in trial.runs) <= fastest)


class _Clock:
    """The time that there is, and reports of how much has gone."""

    _PARTS = 100_000

    def __init__(self, seconds: float, progress: Report | None) -> None:
        self._begin, self._seconds, self._progress = time.perf_counter(), seconds, progress

    def is_over(self) -> bool:
        return time.perf_counter() >= self._begin + self._seconds

    def share(self, stages: int) -> float:
        """When a stage should end, so that all `stages` that are left get as much time."""
        now = time.perf_counter()
        return now + max(0.0, self._begin + self._seconds - now) / stages

    def report(self, ended: bool = False) -> None:
        gone = int(self._PARTS * (time.perf_counter() - self._begin) / self._seconds)
        if self._progress is not None:
            self._progress("tune", self._PARTS if ended else min(gone, self._PARTS - 1), self._PARTS)


def _measure(
    path: str | Path, workload: Workload, candidates: list[Settings], end: float, clock: _Clock
) -> tuple[Trial, ...]:
    """Rounds of all candidates, the second one backwards and so on, while another one ends in time."""
    runs: dict[Settings, list[Measurement]] = {settings: [] for settings in candidates}
    longest = 0.0
    for number in range(MAX_ROUNDS):
        begin = time.perf_counter()
        if number >= MIN_ROUNDS and begin + longest > end:
            break
        for settings in reversed(candidates) if number % 2 else candidates:
            runs[settings].append(workload.run(path, settings))
            clock.report()
        longest = max(longest, time.perf_counter() - begin)
    return tuple(Trial(settings, tuple(measured)) for settings, measured in runs.items())


def _size(path: str | Path, goal: Goal, settings: Settings, context: int, seconds: float) -> Workload:
    """The largest workload of which a whole search runs in the time, by the smallest one's. The first run
    also packs the weights, and is not counted."""
    answer = min(SMALLEST_ANSWER, context // 2)
    smallest = Workload(goal, min(SMALLEST_PROMPT, context - answer), answer)
    smallest.run(path, settings)
    begin = time.perf_counter()
    work = smallest.run(path, settings).seconds
    opening = time.perf_counter() - begin - work
    most = (seconds / EXPECTED_RUNS - opening) / work
    scale = max(1, min(LARGEST_SCALE, int(most), context // (smallest.prompt + answer)))
    return replace(smallest, prompt=scale * smallest.prompt, answer=scale * answer)


def _candidates(
    machine: Machine, profile: DeviceProfile, workload: Workload, kv_dtypes: Sequence[KvDtype]
) -> list[tuple[str, tuple[Any, ...]]]:
    """Each setting's values, the simplest first: fewer threads, else what holds without tuning. A token
    budget that the workload never fills cannot be told from a larger one."""
    filled = workload.prompt * (workload.requests if workload.goal == "throughput" else 1)
    budgets = [budget for budget in TOKEN_BUDGETS if budget < filled and budget != profile.token_budget]
    return [
        ("threads", tuple(_thread_counts(machine.usable_cores))),
        ("max_batch_tokens", (profile.token_budget, *budgets)),
        ("speculation", ("ngram", "off")),
        ("kv_dtype", tuple(dict.fromkeys(kv_dtypes))),
    ]


def _thread_counts(cores: int) -> Iterator[int]:
    """All of few cores, quarters of many."""
    yield from range(1, cores + 1) if cores <= 4 else sorted({cores * part // 4 for part in (1, 2, 3, 4)})


def _changed(settings: Settings, setting: str, value: Any) -> Settings:
    return replace(settings, **{setting: value})


def _profile(
    profile: DeviceProfile, settings: Settings, goal: Goal, machine: Machine, path: str | Path
) -> DeviceProfile:
    """`auto`'s profile with the settings in it."""
    description = (
        f"Tuned for {goal}: {Path(path).name} on {machine.cpu_brand or machine.architecture}, threads: "
        f"{settings.threads}, {settings.max_batch_tokens} tokens a step, {settings.kv_dtype} cache, "
        f"speculation {settings.speculation}"
    )
    return replace(
        profile,
        description="".join(c if c.isprintable() else "?" for c in description),
        threads=settings.threads,
        token_budget=settings.max_batch_tokens,
        kv_dtype=settings.kv_dtype,
        speculation=settings.speculation,
    )
