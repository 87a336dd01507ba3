"""Steps of quantization compared on a model's first layers, which takes a sixth of the time of the whole.

    python benchmarks/quantize_layers.py                            # the rows below, five layers of smollm2
    python benchmarks/quantize_layers.py --add --row 'rotated balanced {"correction": 0.75}'

Rows are those of `quantize.py`. The first layers are quantized as they would be in the whole model. On
held-out texts, 24 windows of 512 tokens each (`quantize_quality.py`), the error is the mean square of what
the residual stream after these layers is off, each token's stream divided by its root mean square, as the
norm that reads it next does: 0.01 is an error of a tenth of the stream. Each row is a process of its own.
Prints a table, and writes JSON after each row.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import quantize_quality
from quantize import row_recipe, row_source
from quantize_quality import encoder, windows_of

PLAIN = '"scaling": false, "correction": 0, "weigh_tokens": false, "sweeps": 0'
ROWS = (
    f"rotated balanced {{{PLAIN}}}",
    "rotated balanced",
    'rotated balanced {"scaling": false}',
    'rotated balanced {"correction": 0}',
    'rotated balanced {"correction": 0.25}',
    'rotated balanced {"correction": 0.75}',
    'rotated balanced {"correction": 1}',
    'rotated balanced {"weigh_tokens": false}',
    'rotated balanced {"sweeps": 0}',
    'rotated balanced {"sweeps": 2}',
    'rotated balanced {"clip_search": false}',
    'rotated balanced {"act_order": "none"}',
    'rotated balanced {"damp": 0.03}',
    # Channels that differ as the model's do, and no grid.
    f"turned balanced {{{PLAIN}}}",
    "turned balanced",
    'turned balanced {"scaling": false}',
    'turned balanced {"correction": 0}',
    'turned balanced {"weigh_tokens": false}',
    'turned balanced {"sweeps": 0}',
    'turned balanced {"clip_search": false}',
    'turned balanced {"act_order": "none"}',
)
WINDOWS = 24
RESULTS = Path(__file__).parent / "results" / "quantize_layers.json"


def measure(model: str, row: str, layers: int, threads: int) -> dict[str, Any]:
    import torch

    from nybble.quant.calibration import load_calibration
    from nybble.quant.forward import embed, forward_layer, to_torch
    from nybble.quant.layer import quantize_layer
    from nybble.quant.packing import quantize_head
    from nybble.quant.scaling import scaled

    torch.set_num_threads(threads)
    recipe, source = row_recipe(row), row_source(model, row)
    text = load_calibration(None, encode=encoder(source), recipe=recipe)
    if recipe.scaling:
        with torch.no_grad():
            source = scaled(source, recipe, text.token_ids, layers)
    spec, exact = source.spec, to_torch(source.tensor(source.spec.embedding_name))
    rounded = to_torch(quantize_head(exact.numpy()))
    formats = {x.name: recipe.format_of(x.name) for layer in range(layers) for x in spec.linears(layer)}
    quantize_quality.WINDOWS = dict.fromkeys(quantize_quality.WINDOWS, WINDOWS)
    windows = windows_of(source)
    ids = np.concatenate(list(windows.values()))
    seconds = cpu_seconds = 0.0
    with torch.no_grad():
        hidden = embed(spec, rounded, text.token_ids)
        reference = embed(spec, exact, text.token_ids) if recipe.follows_reference else None
        stream, wanted = embed(spec, rounded, ids), embed(spec, exact, ids)
        for layer in range(layers):
            start, busy = time.monotonic(), time.process_time()
            tensors = quantize_layer(source, layer, recipe, hidden, reference, formats).tensors
            seconds += time.monotonic() - start
            cpu_seconds += time.process_time() - busy
            forward_layer(spec, layer, {name: to_torch(x) for name, x in tensors.items()}, stream)
            forward_layer(spec, layer, {name: to_torch(source.tensor(name)) for name in tensors}, wanted)
        off = (_normed(stream) - _normed(wanted)).square().mean(-1)
    parts = off.split([len(part) for part in windows.values()])
    errors = {name: float(part.mean()) for name, part in zip(windows, parts, strict=True)}
    return {"recipe": recipe.to_json(), "seconds": seconds, "cpu_seconds": cpu_seconds, "errors": errors}


def _normed(stream: Any) -> Any:
    return stream / stream.square().mean(-1, keepdim=True).sqrt()


def show(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    names = list(rows[0]["errors"])
    table = Table("", "seconds", "CPU s", *names, title="Error of the residual stream, thousandths")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        figures = [f"{row[key]:.0f}" if row.get(key) else "" for key in ("seconds", "cpu_seconds")]
        table.add_row(row["name"], *figures, *(f"{row['errors'][name] * 1000:.2f}" for name in names))
    Console(width=130).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="a Hugging Face folder, a GGUF file, or smollm2")
    parser.add_argument("--row", action="append", help="one of the table's; may be repeated")
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--add", action="store_true", help="keep the rows that the output has")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    model, layers, threads = arguments.model, arguments.layers, arguments.threads
    if arguments.child:
        print(json.dumps(measure(model, arguments.child, layers, threads)))
        return
    kept = arguments.add and arguments.output.exists()
    rows = json.loads(arguments.output.read_text())["rows"] if kept else []
    for row in arguments.row or ROWS:
        command = [sys.executable, __file__, "--model", model, "--layers", str(layers)]
        command += ["--threads", str(threads), "--child", row]
        child = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found = {"name": row, **json.loads(child.stdout.splitlines()[-1])}
        rows = [*(x for x in rows if x["name"] != row), found]
        print(f"{row}: {found['errors']}", file=sys.stderr, flush=True)
        report = {"model": Path(model).name, "layers": layers, "threads": threads, "rows": rows}
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    show(rows)


if __name__ == "__main__":
    main()
