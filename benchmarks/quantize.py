"""Quantization of a model: wall time, peak resident memory and quality for each recipe.

    python benchmarks/quantize.py                                  # smollm2, the rows below
    python benchmarks/quantize.py --row balanced --row 'balanced {"group_size": 64}'
    python benchmarks/quantize.py --gptqmodel-python .venv-gptqmodel/bin/python \\
        --llamacpp-python .venv-llamacpp/bin/python
    python benchmarks/quantize.py --add --row fast                 # that row anew, the others kept

A row is a recipe's name with settings that replace its own, or a peer's name, and `rotated` or `turned`
before it for the same model with its residual stream rotated at random or by a little (`rotated.py`). Each
row is a process of its own. The time is that of `quantize` with opening the model and reading the calibration
text, without importing torch and writing; the memory is the process's peak by the end of it. Quality is
computed afterwards in torch float32 over the dequantized weights, 8-bit embedding and head included:
perplexity, KL divergence to the float model and agreement of the most likely token, on 40 windows of 512
tokens of the odd entries of `pydoc_data.topics` (calibration takes the even ones) and on other texts. With
`--gptqmodel-python`, GPTQModel quantizes the same weights on the same windows with 4 bits, symmetric, group
64; with `--llamacpp-python`, llama.cpp makes Q4_0 and Q4_K_M of them, with its own types of embedding and
head. Writes JSON after each row, and prints a table and which rows failed.
"""

import argparse
import json
import os
import platform
import resource
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from peers import default_gguf
from quantize_peers import LLAMACPP_KINDS, ChildError, measure_gptqmodel, measure_llamacpp, run
from quantize_quality import compare, encoder, ends_of, windows_of
from rotated import A_LITTLE, RotatedSource

from nybble.models import ModelSource, open_source
from nybble.quant.recipe import Recipe
from nybble.quant.recipe_files import load_recipe

PLAIN = '{"scaling": false, "correction": 0, "weigh_tokens": false, "sweeps": 0'
NEUTRAL = '{"weigh_tokens": false, "clip_search": false, "act_order": "none"'
ROWS = (
    "fast",
    "balanced",
    "best",
    'balanced {"symmetric": true, "group_size": 64}',
    'balanced {"symmetric": true}',
    'balanced {"group_size": 64}',
    f"balanced {PLAIN}}}",
    f'balanced {PLAIN}, "symmetric": true, "group_size": 64}}',
    'fast {"symmetric": true, "group_size": 64}',
    'balanced {"bits": 8, "group_size": 64, "symmetric": true}',
    'fast {"bits": 8, "group_size": 64, "symmetric": true}',
    "rotated fast",
    f"rotated balanced {PLAIN}}}",
    "rotated balanced",
    "rotated best",
    # A copy without a grid whose channels differ as the model's do, with and without scales.
    "turned fast",
    'turned fast {"scaling": false}',
    "turned balanced",
    'turned balanced {"scaling": false}',
    'rotated balanced {"scaling": false}',
    # Each step of `balanced` left out, and more of the correction.
    'fast {"scaling": false}',
    'balanced {"scaling": false}',
    'balanced {"correction": 0}',
    'balanced {"correction": 1}',
    'balanced {"weigh_tokens": false}',
    'balanced {"sweeps": 0}',
    'balanced {"clip_search": false}',
    'balanced {"act_order": "none"}',
    # Those that five layers show nothing of, on three models.
    *(f"{copy}balanced {NEUTRAL}}}" for copy in ("", "rotated ")),
    *(
        f"{copy}balanced {step}"
        for copy in ("turned ", "rotated ")
        for step in ('{"weigh_tokens": false}', '{"act_order": "none"}')
    ),
    'rotated balanced {"clip_search": false}',
    # GPTQModel's format.
    'rotated balanced {"symmetric": true, "group_size": 64}',
    # Rates of tuning below that of `best`.
    'best {"tune_rate": 0.0005}',
    'best {"tune_rate": 0.00025}',
    # A budget of bits.
    'balanced {"average_bits": 4.4}',
    'balanced {"average_bits": 4.5}',
    'balanced {"average_bits": 4.75}',
    'balanced {"average_bits": 5}',
)
RESULTS = Path(__file__).parent / "results" / "quantize.json"


def row_recipe(row: str) -> Recipe:
    name, _, settings = row.removeprefix("rotated ").removeprefix("turned ").partition(" ")
    return Recipe.from_json(load_recipe(name).to_json() | json.loads(settings or "{}"))


def row_source(model: str, row: str) -> ModelSource:
    source = open_source(model)
    if row.startswith("turned "):
        return RotatedSource(source, turn=A_LITTLE)
    return RotatedSource(source) if row.startswith("rotated ") else source


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def bits_per_weight(source: ModelSource, recipe: Recipe) -> float:
    """Of the linear layers: codes, scales and zero points."""
    spec = source.spec
    linears = [x for layer in range(spec.num_layers) for x in spec.linears(layer)]
    used = sum(x.out_features * recipe.format_of(x.name).row_bits(x.in_features) for x in linears)
    return used / sum(x.out_features * x.in_features for x in linears)


def measure(model: str, row: str, threads: int, reference: Path) -> dict[str, Any]:
    import torch

    from nybble.quant.calibration import load_calibration
    from nybble.quant.quality import DequantizedModel
    from nybble.quant.quantize import quantize

    torch.set_num_threads(threads)
    recipe = row_recipe(row)
    start, busy = time.monotonic(), time.process_time()
    source = row_source(model, row)
    calibration = None
    if recipe.needs_text:
        calibration = load_calibration(None, encode=encoder(source), recipe=recipe)
    result = quantize(source, recipe, calibration, threads=threads)
    seconds, busy, peak = time.monotonic() - start, time.process_time() - busy, peak_bytes()
    quality = compare(DequantizedModel(result), windows_of(source), torch.load(reference, weights_only=False))
    return {
        "recipe": recipe.to_json(),
        "seconds": seconds,
        "cpu_seconds": busy,
        "peak_bytes": peak,
        "bits_per_weight": bits_per_weight(source, result.recipe),
        "mean_layer_error": float(np.mean(list(result.layer_errors.values()))),
        "texts": quality,
    }


def measure_reference(model: str, threads: int, reference: Path) -> dict[str, Any]:
    """The float model's own figures; what others are compared with goes into the file `reference`."""
    import torch

    torch.set_num_threads(threads)
    source = open_source(model)
    windows = windows_of(source)
    ends = ends_of(source, windows)
    torch.save(ends, reference)
    return {"texts": compare(source, windows, None, ends)}


def show(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    names = list(rows[0]["texts"])
    table = Table("", "bits", "seconds", "peak MB", title="Quantization: perplexity, KL ‰, same token %")
    for name in names:
        table.add_column(name)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        bits = f"{row['bits_per_weight']:.2f}" if "bits_per_weight" in row else ""
        seconds = f"{row['seconds']:.1f}" if row.get("seconds") else ""
        peak = f"{row['peak_bytes'] / 1e6:.0f}" if "peak_bytes" in row else ""
        cells = []
        for figures in row["texts"].values():
            more = f" {figures['kl'] * 1000:.1f} {figures['top1'] * 100:.1f}" if "kl" in figures else ""
            cells.append(f"{figures['perplexity']:.3f}{more}")
        table.add_row(row["name"], bits, seconds, peak, *cells)
    Console(width=160).print(table)


def versions() -> dict[str, str]:
    from importlib.metadata import version

    return {"python": platform.python_version()} | {name: version(name) for name in ("numpy", "torch")}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="a Hugging Face folder, a GGUF file, or smollm2")
    parser.add_argument("--row", action="append", help="one of the table's; may be repeated")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--gptqmodel-python", help="a Python in which GPTQModel is installed")
    parser.add_argument("--llamacpp-python", help="a Python in which llama-cpp-python is installed")
    parser.add_argument("--add", action="store_true", help="keep the rows that the output has")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--reference", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    model, threads = arguments.model, arguments.threads
    if arguments.child:
        if arguments.child == "reference":
            figures = measure_reference(model, threads, arguments.reference)
        else:
            figures = measure(model, arguments.child, threads, arguments.reference)
        print(json.dumps(figures))
        return
    with tempfile.TemporaryDirectory() as folder:
        reference = Path(folder) / "reference.pt"

        def child(what: str) -> dict[str, Any]:
            command = [sys.executable, __file__, "--model", model, "--threads", str(threads)]
            command += ["--reference", str(reference), "--child", what]
            figures: dict[str, Any] = json.loads(run(command, threads).splitlines()[-1])
            return figures

        rows = [{"name": "float32", **child("reference")}]
        if arguments.add and arguments.output.exists():
            rows += json.loads(arguments.output.read_text())["rows"][1:]
        peers = peer_work(arguments, reference)
        failed = []
        for name in arguments.row or [*ROWS, *peers]:
            try:
                found = {"name": name, **(peers[name]() if name in peers else child(name))}
            except ChildError as error:
                failed.append(name)
                print(f"{name}: {error}", file=sys.stderr, flush=True)
                continue
            rows = [*(x for x in rows if x["name"] != name), found]
            print(f"{name}: {found['texts']}", file=sys.stderr, flush=True)
            write(arguments.output, model, threads, rows)
    show(rows)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def peer_work(arguments: argparse.Namespace, reference: Path) -> dict[str, Callable[[], dict[str, Any]]]:
    """What is to be done by others, by the row's name."""
    model, threads = arguments.model, arguments.threads
    gguf = default_gguf() if model == "smollm2" else Path(model)

    def gptqmodel(prefix: str) -> dict[str, Any]:
        return measure_gptqmodel(row_source(model, prefix), threads, arguments.gptqmodel_python, reference)

    def llamacpp(prefix: str, kind: str) -> dict[str, Any]:
        source, python = row_source(model, prefix), arguments.llamacpp_python
        assert gguf is not None
        return measure_llamacpp(source, gguf, threads, python, reference, kind)

    found: dict[str, Callable[[], dict[str, Any]]] = {}
    for prefix in ("", "rotated "):
        if arguments.gptqmodel_python:
            found[f"{prefix}GPTQModel"] = partial(gptqmodel, prefix)
        if arguments.llamacpp_python:
            for kind in LLAMACPP_KINDS:
                found[f"{prefix}llama.cpp {kind}"] = partial(llamacpp, prefix, kind)
    return found


def write(output: Path, model: str, threads: int, rows: list[dict[str, Any]]) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "command": shlex.join(["python", "benchmarks/quantize.py", *sys.argv[1:]]),
        "model": Path(model).name,
        "threads": threads,
        "versions": versions(),
        "rows": rows,
    }
    output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
