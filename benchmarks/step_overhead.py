"""What a decode step takes in Python: everything in `Engine.step` but the executor's part of it.

    python benchmarks/step_overhead.py ARTIFACT --threads 2

Scheduling, building the batch, choosing tokens, turning them into text: as it is between two steps, each of
which has emptied the processor's caches. Each case decodes `--steps` tokens of one or 16 continuations of
prose; the figures are medians over the calls of `Engine.step`, each of which is shared out among the steps of
decoding that it took.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from machine import busy_between, machine

from nybble import SamplingParams
from nybble.loading import Loaded, load
from nybble.runtime.engine import Engine
from nybble.runtime.sequence import Request

RESULTS = Path(__file__).parent / "results" / "step_overhead.json"
TARGET = 0.00015  # seconds, of a step of one sequence


@dataclass(frozen=True)
class Case:
    name: str
    sequences: int
    prompt: int  # tokens
    settings: dict[str, Any]


GREEDY = {"temperature": 0.0}
NUCLEUS = {"temperature": 0.8, "top_p": 0.95}
EVERYTHING = {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "repetition_penalty": 1.1}
CASES = (
    Case("greedy", 1, 128, GREEDY),
    Case("greedy after 4000 tokens", 1, 4000, GREEDY),
    Case("temperature and top-p", 1, 128, NUCLEUS),
    Case("top-k, top-p, repetition penalty", 1, 128, EVERYTHING),
    Case("16 sequences, greedy", 16, 128, GREEDY),
    Case("16 sequences, temperature and top-p", 16, 128, NUCLEUS),
)


class TimedExecutor:
    """An executor that notes how long its last call took, and how many steps that was."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self.seconds, self.steps = 0.0, 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def step(self, batch: Any) -> Any:
        start = time.perf_counter()
        logits = self._executor.step(batch)
        self.seconds, self.steps = time.perf_counter() - start, 1
        return logits

    def decode(self, *arguments: Any) -> Any:
        start = time.perf_counter()
        tokens = self._executor.decode(*arguments)
        self.seconds, self.steps = time.perf_counter() - start, len(tokens)
        return tokens


def measure(loaded: Loaded, case: Case, steps: int) -> tuple[list[float], list[float]]:
    """Seconds of each step outside and inside the executor."""
    executor = TimedExecutor(loaded.executor)
    engine = Engine(
        executor,
        loaded.tokenizer,
        max_model_len=loaded.max_model_len,
        max_batch_tokens=loaded.max_batch_tokens,
        max_sequences=loaded.max_sequences,
    )
    params = SamplingParams(**case.settings, max_tokens=steps + 1, ignore_eos=True, seed=1)
    text = "\n".join(topics[name] for name in sorted(topics))
    ids = loaded.tokenizer.encode(text[: 16 * (case.prompt + case.sequences)])
    sequences = [
        engine.add(Request(str(i), tuple(ids[i : i + case.prompt]), params)) for i in range(case.sequences)
    ]
    while any(sequence.num_output == 0 for sequence in sequences):
        engine.step()
    outside, inside = [], []
    while engine.has_work and all(not sequence.finished for sequence in sequences):
        start = time.perf_counter()
        engine.step()
        outside.append((time.perf_counter() - start - executor.seconds) / executor.steps)
        inside.append(executor.seconds / executor.steps)
    return outside, inside


def main() -> None:
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    loaded = load(
        arguments.artifact, device="auto", executor="cpu", format="auto", providers=None,
        threads=arguments.threads, memory_budget=None, max_model_len=4000 + arguments.steps + 1,
        max_batch_tokens=None, max_sequences=16, kv_dtype=None, cache=True,
    )  # fmt: skip
    busy = busy_between()
    table = Table("", "ms in Python", "share of the step", "target")
    for column in table.columns[1:]:
        column.justify = "right"
    cases = {}
    for case in CASES:
        outside, inside = measure(loaded, case, arguments.steps)
        overhead, step = statistics.median(outside), statistics.median(inside)
        share, target = overhead / (overhead + step), TARGET if case.sequences == 1 else None
        cases[case.name] = {
            "seconds": overhead, "executor_seconds": step, "share": share, "target": target,
            "steps": len(outside),
        }  # fmt: skip
        shown = "" if target is None else f"{target * 1e3:.2f}"
        table.add_row(case.name, f"{overhead * 1e3:.3f}", f"{share:.1%}", shown)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    report = {
        "command": f"python benchmarks/step_overhead.py {arguments.artifact.name}"
        f" --threads {arguments.threads}",
        "machine": machine(),
        "threads": arguments.threads,
        "busy_before": busy,
        "cases": cases,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
