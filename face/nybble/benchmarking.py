"""`bench`: how fast a model runs here, and how close that is to what the machine can do."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from .devices import (
    Energy,
    Machine,
    MachineLimits,
    PowerMeter,
    measure_on,
    peak_resident_bytes,
    probe,
    read_heat,
    resolve_device,
    slowed,
    with_tuned,
)
from .errors import DoesNotFitError, SettingError
from .kvcache import KvCache
from .loading import Loaded, choose_executor, load
from .models.spec import ModelSpec
from .quant.recipe import Recipe
from .records import dataclass
from .runnable import open_runnable
from .runtime.batch import Batch
from .runtime.cpu_executor import CpuExecutor
from .runtime.engine import build_batch
from .runtime.executor import Executor, KvDtype
from .runtime.scheduler import Chunk
from .runtime.sequence import Request
from .runtime.sequence import Sequence as Running

Report = Callable[[str, int, int], None]

SEED = 1  # of the token ids
DECODE_STEPS = 8  # of a repetition, in one call where there is one: a length is measured from it on
PREFILL, DECODE, SEQUENCES = (128, 512, 2048), (0, 512, 2048), (1, 4, 8)


@dataclass(frozen=True)
class Case:
    """What is measured: a prompt of `length` tokens; or steps of one new token for each of `sequences`, which
    have `length` tokens in the cache."""

    phase: Literal["prefill", "decode"]
    length: int
    sequences: int = 1

    @property
    def context(self) -> int:
        """Tokens that each sequence has in the end."""
        return self.length + (DECODE_STEPS if self.phase == "decode" else 0)

    def __str__(self) -> str:
        if self.phase == "prefill":
            return f"prefill of {self.length}"
        return f"decode of {self.sequences} at {self.length}"


@dataclass(frozen=True)
class Row:
    """A case's figures. Seconds are the median of a whole prefill, or of one decode step of greedy answers.
    Energy is that of the whole system, over all repetitions."""

    case: Case
    threads: int
    tokens: int  # computed in those seconds
    seconds: float
    bytes: int  # of weights and cache that were read for it, each once a step
    operations: int  # of the linear layers; multiply and add are two
    joules_per_token: float | None = None  # None where the system doesn't tell
    watts: float | None = None
    slowed: tuple[str, ...] = ()  # what slowed the CPU down meanwhile

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Benchmark:
    """A run's figures. `isa`, and `limits` for each number of threads, are our own kernels': ONNX Runtime has
    none."""

    spec: ModelSpec
    recipe: Recipe | None  # None: layers differ, as a GGUF file's may
    weight_bytes: int  # that every step reads
    rows: tuple[Row, ...]
    omitted: tuple[str, ...]  # cases that memory does not hold
    isa: str | None
    kv_dtype: KvDtype
    peak_bytes: int | None  # the most memory resident, measuring the limits left out
    limits: tuple[MachineLimits, ...]
    power_sources: tuple[str, ...]  # of what energy is the sum
    power_note: str  # why others aren't

    def bandwidth_share(self, row: Row) -> float | None:
        """Bytes that had to be read, of those that this machine could have read in the time."""
        limits = self._limits(row)
        return None if limits is None else row.bytes / row.seconds / limits.bandwidth.at(row.bytes)

    def integer_share(self, row: Row) -> float | None:
        """Operations of the linear layers, of those that this machine could have done in the time."""
        limits = self._limits(row)
        return None if limits is None else row.operations / row.seconds / limits.integer_rate

    def _limits(self, row: Row) -> MachineLimits | None:
        return next((limits for limits in self.limits if limits.threads == row.threads), None)


def bench(
    path: str | Path,
    *,
    prefill: Sequence[int] | None = None,
    decode: Sequence[int] | None = None,
    sequences: Sequence[int] = SEQUENCES,
    threads: Sequence[int] = (),
    repeat: int = 5,
    device: str = "auto",
    executor: str = "auto",
    format: str = "auto",
    providers: Sequence[str] | None = None,
    memory_budget: int | float | str | None = None,
    kv_dtype: str | None = None,
    cache: bool = True,
    tuned: bool = True,
    progress: Report | None = None,
) -> Benchmark:
    """Times prompts of `prefill` tokens, and steps of 1, 4, ... `sequences` that have `decode` tokens, on the
    executor that `LLM` would use: medians of `repeat` repetitions, with the same random tokens in every run.
    None is those of the default lengths that context and memory hold; no `threads` are the device's. The
    model is opened again for each number of threads.

    Raises `SettingError` for a value out of range and what `LLM` raises, before anything is measured.
    """
    machine = probe(providers=False)
    profile = resolve_device(device, machine)
    kind = choose_executor(executor, profile, providers)
    with closing(open_runnable(path, format, kind)) as model:
        spec, recipe = model.spec, model.recipe
        if tuned and device == "auto" and kind == "cpu":
            profile = with_tuned(profile, model.digest, machine)
    counts = threads or (profile.threads,)
    for name, values, least in (
        ("prefill", prefill or (), 1),
        ("decode", decode or (), 0),
        ("sequences", sequences, 1),
        ("threads", counts, 1),
        ("repeat", (repeat,), 1),
    ):
        if any(value < least for value in values):
            raise SettingError(f"{name} is {min(values)}; expected at least {least}")
    cases, asked = _cases(prefill, decode, sequences, min(spec.max_position, profile.context))
    open_with = partial(
        load,
        path,
        device=device,
        executor=executor,
        format=format,
        providers=providers,
        memory_budget=memory_budget,
        max_batch_tokens=None,
        kv_dtype=kv_dtype,
        cache=cache,
        tuned=tuned,
    )
    rows: list[Row] = []
    omitted: dict[Case, str] = {}
    with PowerMeter(gpus=kind == "ort") as meter:
        for count in counts:
            loaded = _open(partial(open_with, threads=count), cases, asked, omitted)
            with closing(loaded.executor):
                runner = Runner(loaded, [case for case in cases if case not in omitted], meter)
                for case in runner.cases:
                    rows.append(runner.measure(case, count, repeat))
                    if progress is not None:
                        progress("bench", len(rows), len(runner.cases) * len(counts))
                isa = loaded.executor.isa if isinstance(loaded.executor, CpuExecutor) else None
                kv_used, weights = loaded.executor.kv_layout.kv_dtype, loaded.executor.weight_bytes
    peak = peak_resident_bytes()
    return Benchmark(
        spec,
        recipe,
        weights,
        tuple(rows),
        tuple(f"{case}: {why}" for case, why in omitted.items()),
        isa,
        kv_used,
        peak,
        () if isa is None else _limits(machine, isa, counts),
        meter.sources,
        meter.note,
    )


def _limits(machine: Machine, isa: str, counts: Sequence[int]) -> tuple[MachineLimits, ...]:
    """Of each number of threads; none where there is too little memory to measure them."""
    keys = [machine.limits_key(count, isa) for count in counts]
    try:
        return tuple(measure_on(machine, key) for key in keys if key is not None)
    except DoesNotFitError:
        return ()


def _per_token(energy: Energy, tokens: int) -> float | None:
    return None if energy.joules is None else energy.joules / tokens


def linear_operations(spec: ModelSpec, tokens: int, rows: int) -> int:
    """Multiplications and additions of the linear layers for `tokens` tokens, of a mixture's experts those
    that a token chooses, and of the head for `rows`: what the model has, though our kernels leave out what
    the last layer would do for tokens whose logits nobody wants."""
    weights = sum(
        linear.out_features * linear.in_features
        for layer in range(spec.num_layers)
        for linear in spec.active_linears(layer)
    )
    return 2 * (tokens * weights + rows * spec.vocab_size * spec.hidden_size)


def _cases(
    prefill: Sequence[int] | None, decode: Sequence[int] | None, sequences: Sequence[int], context: int
) -> tuple[list[Case], set[Case]]:
    """What to measure, and which of it was asked for by its length."""
    asked = [Case("prefill", length) for length in prefill or ()]
    asked += [Case("decode", length, many) for many in sequences for length in decode or ()]
    for case in asked:
        if case.context > context:
            raise SettingError(f"{case} needs a context of {case.context} tokens; it is {context} here")
    usual = [Case("prefill", length) for length in PREFILL if prefill is None]
    usual += [Case("decode", length, many) for many in sequences for length in DECODE if decode is None]
    cases = list(dict.fromkeys(asked + [case for case in usual if case.context <= context]))
    if not cases:
        raise SettingError(f"there is nothing to measure in a context of {context} tokens")
    return sorted(cases, key=lambda case: (case.phase != "prefill", case.sequences, case.length)), set(asked)


def _open(
    open_with: Callable[..., Loaded], cases: list[Case], asked: set[Case], omitted: dict[Case, str]
) -> Loaded:
    """The model with room for all cases but those that memory does not hold, which join `omitted`. Raises
    `DoesNotFitError` where one of these was asked for, or none is left."""
    while True:
        left = [case for case in cases if case not in omitted]
        longest = max(case.context for case in left)
        too_long = {case for case in left if case.context == longest}
        try:
            loaded = open_with(max_model_len=longest, max_sequences=max(case.sequences for case in left))
        except DoesNotFitError as error:
            if too_long & asked or len(too_long) == len(left):
                raise
            omitted |= dict.fromkeys(too_long, str(error))
            continue
        # Sequences may share pages that are too few for all of them to be long.
        layout = loaded.executor.kv_layout
        held = min(loaded.max_sequences, layout.num_blocks // -(-longest // layout.page_size))
        for case in left:
            if case.sequences > held:
                omitted[case] = f"memory holds {held} of {longest} tokens"
        return loaded


class Runner:
    """Sequences of random tokens on an open executor, whose cache they fill up to the longest decode."""

    def __init__(self, loaded: Loaded, cases: list[Case], meter: PowerMeter | None = None) -> None:
        self.cases = cases
        self._meter = meter or PowerMeter()
        self._executor: Executor = loaded.executor
        self._step_tokens = loaded.max_batch_tokens
        self._skipped: list[int] = []  # bytes of weights that decode steps did without
        spec, layout = self._executor.spec, self._executor.kv_layout
        context = max(case.context for case in cases)
        self._ids = np.random.default_rng(SEED).integers(0, spec.vocab_size, context).tolist()
        cache = KvCache(layout.num_blocks, layout.page_size, spec.window_groups or (None,))
        self._sequences = [
            Running(
                Request(str(number), tuple(self._ids)),
                loaded.tokenizer,
                cache.sequence(),
                max_tokens=1,
                stop_ids=frozenset(),
            )
            for number in range(max(case.sequences for case in cases))
        ]
        for sequence in self._sequences:
            sequence.blocks.append(context)
        self._fill(max((case.length for case in cases if case.phase == "decode"), default=0))

    def run(self, case: Case) -> list[float]:
        """Seconds of a whole prefill, or of each of `DECODE_STEPS` steps as greedy answers take them: in one
        call of an executor that has such, in equal parts of its time."""
        if case.phase == "prefill":
            return self._prefill(case)
        return self._decode(case) if self._executor.decode_steps >= DECODE_STEPS else self.run_steps(case)

    def run_steps(self, case: Case) -> list[float]:
        """Seconds of each of `DECODE_STEPS` steps with all logits, a call each."""
        sequences = self._sequences[: case.sequences]
        return [
            self._step(sequences, length + 1, length, 1)
            for length in range(case.length, case.length + DECODE_STEPS)
        ]

    def measure(self, case: Case, threads: int, repeat: int) -> Row:
        """Medians of `repeat` runs after one that is not counted."""
        self.run(case)
        self._skipped.clear()
        before = read_heat()
        with self._meter.measure() as energy:
            seconds = [taken for _ in range(repeat) for taken in self.run(case)]
        held_back = slowed(before, read_heat())
        spec, weights = self._executor.spec, self._executor.weight_bytes
        if case.phase == "prefill":
            starts = range(0, case.length, self._step_tokens)
            cached = sum(map(self._cached_bytes, starts))
            tokens, read = case.length, len(starts) * weights + cached
            operations = linear_operations(spec, case.length, 1)
        else:
            cached = sum(self._cached_bytes(case.length + step) for step in range(DECODE_STEPS))
            skipped = int(statistics.median(self._skipped or [0]))
            tokens, read = case.sequences, weights - skipped + case.sequences * cached // DECODE_STEPS
            operations = linear_operations(spec, case.sequences, case.sequences)
        return Row(
            case,
            threads,
            tokens,
            statistics.median(seconds),
            read,
            operations,
            _per_token(energy, tokens * len(seconds)),
            energy.watts,
            held_back,
        )

    def _fill(self, length: int) -> None:
        """Computes the first sequence's cache and copies it to the others, which have the same tokens."""
        if length == 0:
            return
        self._prefill(Case("prefill", length))
        pages = -(-length // self._executor.kv_layout.page_size)
        # The pools hand out the same numbers, so the first group's table is that of all.
        source, *others = (sequence.blocks.tables[0][:pages] for sequence in self._sequences)
        for target in others:
            for group in range(self._sequences[0].blocks.num_groups):
                self._executor.copy_blocks(np.array(source, np.int32), np.array(target, np.int32), group)

    def _prefill(self, case: Case) -> list[float]:
        sequence, seconds = self._sequences[0], 0.0
        for start in range(0, case.length, self._step_tokens):
            count = min(self._step_tokens, case.length - start)
            seconds += self._step([sequence], case.length, start, count)
        return [seconds]

    def _decode(self, case: Case) -> list[float]:
        batch = self._batch(self._sequences[: case.sequences], case.length + 1, case.length, 1)
        begin = time.perf_counter()
        chosen = self._executor.decode(batch, DECODE_STEPS, (), math.inf)
        seconds = time.perf_counter() - begin
        self._skipped.append(self._executor.skipped_bytes // len(chosen))
        return [seconds / len(chosen)] * len(chosen)

    def _step(self, sequences: list[Running], length: int, start: int, count: int) -> float:
        """Seconds of a step of `count` tokens from `start` on, of sequences of `length` tokens."""
        batch = self._batch(sequences, length, start, count)
        begin = time.perf_counter()
        self._executor.step(batch)
        return time.perf_counter() - begin

    def _batch(self, sequences: list[Running], length: int, start: int, count: int) -> Batch:
        for sequence in sequences:
            sequence.tokens, sequence.computed = self._ids[:length], start
        return build_batch([Chunk(sequence, count) for sequence in sequences])

    def _cached_bytes(self, tokens: int) -> int:
        """Bytes of one sequence's cache that a step after `tokens` tokens reads."""
        spec, layout = self._executor.spec, self._executor.kv_layout
        windows = spec.sliding_windows or (None,) * spec.num_layers
        seen = sum(tokens if window is None else min(tokens, window) for window in windows)
        return layout.bytes_per_block * seen // (layout.page_size * spec.num_layers)
