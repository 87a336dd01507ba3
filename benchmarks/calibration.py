"""What a model is calibrated on: perplexity and KL divergence by calibration text.

    python benchmarks/calibration.py
    python benchmarks/calibration.py --set group_size=32 --calibration default --calibration default,self

Each `--calibration` is a run: names as `nybble quantize` takes them, joined with commas. Every result runs on
our own kernels over the first 40 windows of 512 tokens of two texts: the odd-numbered entries of
`pydoc_data.topics` (the default calibration takes the even ones), and sources of Python's standard library.
The reference is the model itself in float32. Prints a table, and writes JSON.
"""

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import machine

from nybble import quantize
from nybble.evaluation import evaluate_all

RESULTS = Path(__file__).parent / "results" / "calibration.json"
CALIBRATIONS = ("default", "self", "default,self")
MODULES = ("argparse", "json/decoder", "textwrap", "statistics", "fractions", "heapq", "csv", "shlex")


def code_text(folder: Path) -> Path:
    """Sources of this Python's standard library, in a file."""
    library = Path(os.__file__).parent
    path = folder / "code.txt"
    path.write_text("\n\n".join((library / f"{name}.py").read_text() for name in MODULES))
    return path


def setting(text: str) -> tuple[str, Any]:
    """NAME=VALUE, the value as JSON or else text."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--calibration", action="append", help="repeatable [default: the three]")
    parser.add_argument(
        "--set", type=setting, action="append", default=[], help="a recipe setting; repeatable"
    )
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    names = arguments.calibration or CALIBRATIONS
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder, artifacts = Path(name), []
        for number, calibration in enumerate(names):
            start = time.perf_counter()
            quantize(
                arguments.model,
                folder / str(number),
                calibration=calibration.split(","),
                formats=["gptq"],
                threads=arguments.threads,
                **dict(arguments.set),
            )
            artifacts.append(folder / str(number))
            rows.append({"calibration": calibration, "seconds": time.perf_counter() - start})
            print(f"{calibration}: {rows[-1]['seconds']:.0f} s", file=sys.stderr, flush=True)
        for kind, text in (("topics", None), ("code", code_text(folder))):
            found = evaluate_all(
                artifacts,
                reference=arguments.model,
                text=text,
                windows=arguments.windows,
                threads=arguments.threads,
            )
            for row, each in zip(rows, found, strict=True):
                assert each.comparison is not None
                row[kind] = {
                    "perplexity": each.perplexity,
                    "reference": each.comparison.perplexity,
                    "mean_kl": each.comparison.mean_kl,
                    "top1_agreement": each.comparison.top1_agreement,
                }
    print("| calibration | seconds | topics: perplexity | mean KL | code: perplexity | mean KL |")
    print("|---|---:|---:|---:|---:|---:|")
    one = rows[0]
    print(f"| float32 | | {one['topics']['reference']:.2f} | | {one['code']['reference']:.2f} | |")
    for row in rows:
        figures = [f"{row[k]['perplexity']:.2f} | {row[k]['mean_kl']:.4f}" for k in ("topics", "code")]
        print(f"| {row['calibration']} | {row['seconds']:.0f} | {' | '.join(figures)} |")
    report = {
        "command": shlex.join(["python", "benchmarks/calibration.py", *sys.argv[1:]]),
        "model": Path(arguments.model).name,
        "settings": dict(arguments.set),
        "machine": machine(),
        "rows": rows,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
