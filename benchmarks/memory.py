"""Resident memory over time: of a first start, which packs the weights, of the next, which maps them, and of
the run after each.

    python benchmarks/memory.py ARTIFACT smollm2

Each is a new process, watched from outside 200 times a second. Caches are empty before a model's first start,
which works on a copy of an artifact.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import compiled, machine

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "support"))

from memory_trace import Trace, trace  # noqa: E402

STARTS = ("first start", "second start")
MEGABYTE = 1e6
KEPT_EVERY = 0.05  # seconds between the samples that are written down


def measure(model: str, context: int, sequences: int, budget: str) -> dict[str, Trace]:
    """The traces by start."""
    with tempfile.TemporaryDirectory() as folder:
        path, environment = model, compiled() | {"XDG_CACHE_HOME": f"{folder}/cache"}
        if os.path.isdir(model):
            path = shutil.copytree(model, f"{folder}/model", ignore=shutil.ignore_patterns("cache"))
        child = [sys.executable, str(HERE / "memory_child.py"), path, str(context), str(sequences), budget]
        return {start: trace(child, environment) for start in STARTS}


def figures(found: Trace) -> dict[str, Any]:
    """Peaks in bytes, and a thinned trace: seconds, resident and anonymous megabytes."""
    kept, samples = -KEPT_EVERY, []
    for sample in found.samples:
        if sample.seconds - kept >= KEPT_EVERY:
            kept = sample.seconds
            megabytes = (round(x / MEGABYTE, 1) for x in (sample.resident, sample.anonymous))
            samples.append((round(sample.seconds, 2), *megabytes))
    return {
        "loading_peak": found.peak(end="loaded"),
        "running_peak": found.peak(begin="loaded"),
        "peak": found.samples[-1].peak,
        "marks": [(round(seconds, 3), line) for seconds, line in found.marks],
        "samples": samples,
    }


def plot(report: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    models = report["models"]
    figure, axes = pyplot.subplots(
        len(models), len(STARTS), figsize=(9, 2.6 * len(models)), sharey="row", squeeze=False
    )
    for row, (model, starts) in zip(axes, models.items(), strict=True):
        for axis, (start, found) in zip(row, starts.items(), strict=True):
            seconds, resident, anonymous = zip(*found["samples"], strict=True)
            axis.plot(seconds, resident, label="resident")
            axis.plot(seconds, anonymous, label="of it anonymous")
            loaded = next(when for when, line in found["marks"] if line == "loaded")
            axis.axvline(loaded, color="gray", linestyle=":", label="loaded")
            axis.set_title(f"{model}, {start}", fontsize=9)
            axis.set_ylim(bottom=0)
        row[0].set_ylabel("MB")
    for axis in axes[-1]:
        axis.set_xlabel("seconds")
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def main() -> None:
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", help="artifacts or GGUF files")
    parser.add_argument("--context", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--memory-budget", default="none")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "memory.json")
    parser.add_argument("--plot", type=Path, default=HERE.parent / "docs" / "memory.png")
    arguments = parser.parse_args()
    models = {}
    for model in arguments.models:
        traces = measure(model, arguments.context, arguments.sequences, arguments.memory_budget)
        models[Path(model).name] = {start: figures(found) for start, found in traces.items()}
    table = Table("model", "start", "loading peak, MB", "running peak, MB")
    for column in table.columns[2:]:
        column.justify = "right"
    for model, starts in models.items():
        for start, found in starts.items():
            peaks = (found["loading_peak"], found["running_peak"])
            table.add_row(model, start, *(f"{peak / MEGABYTE:.1f}" for peak in peaks))
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    report = {
        "command": "python benchmarks/memory.py " + " ".join(models),
        "machine": machine(),
        "context": arguments.context,
        "sequences": arguments.sequences,
        "memory_budget": arguments.memory_budget,
        "models": models,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report) + "\n")
    plot(report, arguments.plot)


if __name__ == "__main__":
    main()
