"""What quantizing takes for each billion weights: models of two sizes with seeded random weights.

    python benchmarks/quantize_sizes.py
    python benchmarks/quantize_sizes.py --recipe balanced --threads 2

Layers of a shape are all alike, so models of one and of three layers tell what a layer takes and what comes
on top, once. The calibration text is 32,768 random tokens. Each run is a process of its own; the memory is
its peak. Weights are made when they are asked for, as a file's are read, and the time has that in it. Prints
a table, and writes JSON.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from seeded_models import MODELS

from nybble.models.spec import ModelSpec
from nybble.quant.recipe_files import load_recipe

SIZES = ("seeded-360m", "seeded-1.5b")
RECIPES = ("fast", "balanced")
LAYERS = (1, 3)
RESULTS = Path(__file__).parent / "results" / "quantize_sizes.json"


class SeededSource:
    """A `ModelSource` of a shape: weights are normal, of a size that keeps activations ordinary."""

    config: Mapping[str, Any] = {}
    generation_config: Mapping[str, Any] = {}
    tokenizer_files: Mapping[str, bytes] = {}
    origin = digest = "seeded"

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec

    def tensor(self, name: str) -> NDArray[np.float32]:
        shape = self.spec.tensors()[name]
        if len(shape) == 1:
            return np.ones(shape, np.float32)
        random = np.random.default_rng(zlib.crc32(name.encode()))
        return random.standard_normal(shape, np.float32) * np.float32(shape[1] ** -0.5)

    def close(self) -> None:
        pass


def linear_weights(spec: ModelSpec) -> int:
    return sum(
        x.out_features * x.in_features for layer in range(spec.num_layers) for x in spec.linears(layer)
    )


def measure(name: str, layers: int, recipe_name: str, threads: int) -> dict[str, float]:
    import torch  # noqa: F401  (its import is no part of the time)

    from nybble.quant.calibration import Calibration
    from nybble.quant.quantize import quantize

    recipe = load_recipe(recipe_name)
    source = SeededSource(replace(MODELS[name].spec, num_layers=layers))
    text = np.random.default_rng(0).integers(0, source.spec.vocab_size, (recipe.samples, recipe.seq_len))
    calibration = Calibration(text.astype(np.int32), "", "")
    start, busy = time.monotonic(), time.process_time()
    quantize(source, recipe, calibration if recipe.needs_text else None, threads=threads)
    return {
        "seconds": time.monotonic() - start,
        "cpu_seconds": time.process_time() - busy,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def extrapolate(name: str, recipe: str, runs: Mapping[int, Mapping[str, float]]) -> dict[str, Any]:
    """From runs by their number of layers: each layer takes the difference."""
    spec = MODELS[name].spec
    few, many = LAYERS
    billions = linear_weights(replace(spec, num_layers=many - few)) / 1e9
    row: dict[str, Any] = {"model": name, "recipe": recipe, "linear_weights": linear_weights(spec)}
    for key in ("seconds", "cpu_seconds"):
        of_layer = (runs[many][key] - runs[few][key]) / (many - few)
        row[f"{key}_per_billion"] = of_layer * (many - few) / billions
        row[f"{key}_of_model"] = runs[few][key] + of_layer * (spec.num_layers - few)
    return row | {"peak_bytes": runs[many]["peak_bytes"], "runs": {str(n): run for n, run in runs.items()}}


def show(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "model", "recipe", "s per billion weights", "CPU s", "whole model, s", "peak of 3 layers, MB"
    )
    for column in table.columns[2:]:
        column.justify = "right"
    for row in rows:
        keys = ("seconds_per_billion", "cpu_seconds_per_billion", "seconds_of_model")
        figures = [f"{row[key]:.0f}" for key in keys]
        table.add_row(row["model"], row["recipe"], *figures, f"{row['peak_bytes'] / 1e6:.0f}")
    Console(width=110).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", action="append", help=f"may be repeated [default: {', '.join(RECIPES)}]")
    parser.add_argument("--model", action="append", choices=MODELS, help="may be repeated")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    threads = arguments.threads
    if arguments.child:
        name, layers, recipe = arguments.child
        print(json.dumps(measure(name, int(layers), recipe, threads)))
        return
    rows = []
    for name in arguments.model or SIZES:
        for recipe in arguments.recipe or RECIPES:
            runs = {}
            for layers in LAYERS:
                command = [sys.executable, __file__, "--threads", str(threads), "--child"]
                command += [name, str(layers), recipe]
                child = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                runs[layers] = json.loads(child.stdout)
            rows.append(extrapolate(name, recipe, runs))
            print(f"{name} {recipe}: {runs}", file=sys.stderr, flush=True)
            report = {"threads": threads, "rows": rows}
            arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    show(rows)


if __name__ == "__main__":
    main()
