"""How requests queue: the real scheduler and cache under random load, with a clock that a cost model moves.

    python benchmarks/simulate.py --requests 100000

No model runs. A step takes what `Costs` says, in virtual seconds; its figures are of the size of a 135M model
on two cores. Requests come at random (`--load` of what the machine could do), of three classes: one in ten
urgent, one in ten that can wait. Two in five begin with one of four system prompts; one in fifty is aborted.
Times in the table are virtual, except "scheduler": what `schedule` and `advance` took in a step.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nybble.kvcache import KvCache
from nybble.runtime.histogram import LatencyHistogram
from nybble.runtime.removable_heap import RemovableHeap
from nybble.runtime.scheduler import Scheduler
from nybble.runtime.sequence_state import SequenceState, shape_of
from nybble.runtime.step_time import StepShape

RESULTS = Path(__file__).parent / "results" / "simulate.json"
CLASSES = {1: "urgent", 0: "normal", -1: "can wait"}


@dataclass(frozen=True)
class Costs:
    """Seconds of a step, and of each part of it."""

    step: float = 4e-3
    decode: float = 1e-3
    context_token: float = 2e-7
    prefill_token: float = 1.2e-3
    pair: float = 1e-7

    def of(self, shape: StepShape) -> float:
        return (
            self.step
            + self.decode * shape.decodes
            + self.context_token * shape.decode_context
            + self.prefill_token * shape.prefill_tokens
            + self.pair * shape.prefill_pairs
        )


@dataclass(frozen=True)
class Workload:
    """What comes: counts of tokens, drawn evenly between two bounds."""

    requests: int = 100_000
    prompt: tuple[int, int] = (16, 400)
    answer: tuple[int, int] = (8, 64)
    system_prompt: int = 256
    load: float = 0.9
    seed: int = 0


@dataclass(frozen=True)
class Machine:
    pages: int = 512
    page_size: int = 16
    max_batch_tokens: int = 256
    max_sequences: int = 16
    ageing_seconds: float = 10.0
    target_seconds: float | None = None


class Simulated(SequenceState):
    """A request: its answer has a length, and tokens that say nothing."""

    def __init__(self, number: int, tokens: list[int], answer: int, priority: int, cache: KvCache) -> None:
        super().__init__(tokens, cache.sequence(), priority=priority)
        self.number, self.prompt, self.answer = number, len(tokens), answer
        self.added = self.last = 0.0
        self.started = False


@dataclass
class Times:
    """Of one class, in virtual seconds."""

    first_token: LatencyHistogram = field(default_factory=LatencyHistogram)
    between_tokens: LatencyHistogram = field(default_factory=LatencyHistogram)
    latency: LatencyHistogram = field(default_factory=LatencyHistogram)


class Simulation:
    """Runs a workload to its end. `each_step(simulation)` is called after every step."""

    def __init__(self, workload: Workload, machine: Machine = Machine(), costs: Costs = Costs()) -> None:
        self.workload, self.machine, self.costs = workload, machine, costs
        self.random = random.Random(workload.seed)
        self.now = 0.0
        self.cache = KvCache(machine.pages, machine.page_size)
        self.scheduler: Scheduler[Simulated] = Scheduler(
            self.cache,
            max_batch_tokens=machine.max_batch_tokens,
            max_sequences=machine.max_sequences,
            ageing_seconds=machine.ageing_seconds,
            target_seconds=machine.target_seconds,
            clock=lambda: self.now,
        )
        self.system_prompts = [self._tokens(workload.system_prompt) for _ in range(4)]
        self.aborts: RemovableHeap[Simulated] = RemovableHeap()
        self.times = {priority: Times() for priority in CLASSES}
        self.step_seconds: list[float] = []  # real ones, of the scheduler
        self.steps = self.finished = self.aborted = self.sequences = self.longest_queue = 0
        self.prefill_tokens = self.prompt_tokens = self.answer_tokens = 0

    def run(self, each_step: Callable[["Simulation"], None] = lambda simulation: None) -> None:
        interval = self._seconds_each() / self.workload.load
        next_arrival, arrived = 0.0, 0
        while arrived < self.workload.requests or self.scheduler.waiting or self.scheduler.running:
            if not (self.scheduler.waiting or self.scheduler.running):
                self.now = max(self.now, next_arrival)
            while arrived < self.workload.requests and next_arrival <= self.now:
                self._arrive(arrived, next_arrival)
                arrived += 1
                next_arrival += self.random.expovariate(1 / interval)
            while (due := self.aborts.least_key()) is not None and due <= self.now:
                sequence = self.aborts.peek()
                assert sequence is not None
                self._leave(sequence)
                self.aborted += 1
            self._step()
            each_step(self)

    def _step(self) -> None:
        began = time.perf_counter()
        plan = self.scheduler.schedule()
        spent = time.perf_counter() - began
        assert not plan.failed
        if not plan.chunks:
            return
        shape = shape_of(plan.chunks)
        seconds = self.costs.of(shape)
        self.now += seconds
        began = time.perf_counter()
        ended = []
        for chunk in plan.chunks:
            sequence, completes = chunk.sequence, chunk.completes
            if completes:
                self._append(sequence)
            self.scheduler.advance(chunk, chunk.count)
            if len(sequence.tokens) >= sequence.prompt + sequence.answer:
                ended.append(sequence)
        for sequence in ended:
            self._finish(sequence)
        self.scheduler.observe(shape, seconds)
        self.step_seconds.append(spent + time.perf_counter() - began)
        self.steps += 1
        self.sequences += shape.sequences
        self.prefill_tokens += shape.prefill_tokens
        self.longest_queue = max(self.longest_queue, len(self.scheduler.waiting))

    def _arrive(self, number: int, at: float) -> None:
        draw = self.random
        tokens = self._tokens(draw.randint(*self.workload.prompt))
        if draw.random() < 0.4:
            tokens = draw.choice(self.system_prompts) + tokens
        priority = draw.choices(list(CLASSES), weights=(1, 8, 1))[0]
        sequence = Simulated(number, tokens, draw.randint(*self.workload.answer), priority, self.cache)
        sequence.added = at
        self.prompt_tokens += len(tokens)
        self.scheduler.add(sequence)
        if draw.random() < 0.02:
            self.aborts.push(sequence, (self.now + draw.uniform(0, 2), number))

    def _append(self, sequence: Simulated) -> None:
        times = self.times[sequence.priority]
        if sequence.started:
            times.between_tokens.add(self.now - sequence.last)
        else:
            times.first_token.add(self.now - sequence.added)
        sequence.started, sequence.last = True, self.now
        sequence.tokens.append(sequence.number * 1000 + len(sequence.tokens) - sequence.prompt)
        self.answer_tokens += 1

    def _finish(self, sequence: Simulated) -> None:
        self.times[sequence.priority].latency.add(self.now - sequence.added)
        self.finished += 1
        self._leave(sequence)

    def _leave(self, sequence: Simulated) -> None:
        self.scheduler.remove(sequence)
        self.aborts.discard(sequence)

    def _tokens(self, count: int) -> list[int]:
        return [self.random.getrandbits(30) for _ in range(count)]

    def _seconds_each(self) -> float:
        """What a request takes of a machine that runs as many at once as it may."""
        shared, batch = 0.4 * self.workload.system_prompt, self.machine.max_sequences
        prompt, answer = sum(self.workload.prompt) / 2, sum(self.workload.answer) / 2
        context = prompt + shared + answer / 2
        decode = self.costs.step / batch + self.costs.decode + self.costs.context_token * context
        prefill = self.costs.prefill_token * prompt + self.costs.pair * prompt * (prompt / 2 + shared)
        return answer * decode + prefill

    def report(self) -> dict[str, Any]:
        tenth = max(1, len(self.step_seconds) // 10)
        return {
            "workload": asdict(self.workload),
            "machine": asdict(self.machine),
            "costs": asdict(self.costs),
            "virtual_seconds": self.now,
            "steps": self.steps,
            "mean_batch": self.sequences / max(1, self.steps),
            "tokens_per_second": self.answer_tokens / self.now,
            "finished": self.finished,
            "aborted": self.aborted,
            "longest_queue": self.longest_queue,
            "preemptions": self.scheduler.preemptions,
            "prefill_share": self.prefill_tokens / self.prompt_tokens,
            "hit_rate": self.cache.statistics.hit_rate,
            "evicted_pages": self.cache.statistics.evicted_pages,
            "scheduler_seconds": {
                "first tenth": statistics.median(self.step_seconds[:tenth]),
                "last tenth": statistics.median(self.step_seconds[-tenth:]),
            },
            "classes": {
                CLASSES[priority]: {name: asdict(getattr(times, name).quantiles()) for name in vars(times)}
                for priority, times in self.times.items()
            },
        }


def show(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    columns = [
        f"{name} {at}"
        for name in ("first token", "between tokens", "latency")
        for at in ("p50", "p90", "p99")
    ]
    table = Table("class", "requests", *columns)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, times in report["classes"].items():
        cells = [f"{times[k][at]:.3f}" for k in times for at in ("p50", "p90", "p99")]
        table.add_row(name, str(times["latency"]["count"]), *cells)
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(table)
    scheduler = report["scheduler_seconds"]
    console.print(
        f"{report['finished']} requests, {report['aborted']} aborted, in {report['virtual_seconds']:.0f} "
        f"virtual seconds; {report['steps']} steps of {report['mean_batch']:.1f} sequences; longest queue "
        f"{report['longest_queue']}; {report['preemptions']} preemptions; {report['hit_rate']:.1%} of the "
        f"prompts' tokens found\n"
        f"scheduler: {scheduler['first tenth'] * 1e6:.0f} µs a step in the first tenth, "
        f"{scheduler['last tenth'] * 1e6:.0f} µs in the last"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--load", type=float, default=0.9)
    parser.add_argument("--pages", type=int, default=512)
    parser.add_argument("--target-ms", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    target = None if arguments.target_ms is None else arguments.target_ms / 1e3
    simulation = Simulation(
        Workload(requests=arguments.requests, load=arguments.load, seed=arguments.seed),
        Machine(pages=arguments.pages, target_seconds=target),
    )
    simulation.run()
    report = simulation.report()
    show(report)
    report = {
        "command": " ".join(["python", "benchmarks/simulate.py", *sys.argv[1:]]),
        **report,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
