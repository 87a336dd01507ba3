"""Quantization of a model: wall time, peak resident memory and perplexity for each recipe.

    python benchmarks/quantize.py                                  # smollm2, the recipes below
    python benchmarks/quantize.py --recipe '{"group_size": 32}' --recipe '{"method": "rtn"}'
    python benchmarks/quantize.py --gptqmodel-python .venv-gptqmodel/bin/python

Each run is a process of its own. The time is that of `quantize` with opening the model and reading the
calibration text, without importing torch; the memory is the process's peak by the end of it. Perplexity is
computed afterwards in torch float32 on 40 windows of 512 tokens of the odd entries of `pydoc_data.topics`
(calibration takes the even ones), over the dequantized weights, 8-bit embedding and head included. With
`--gptqmodel-python`, GPTQModel quantizes the same weights on the same windows with the same bits, group size
and symmetry, and its result is measured in the same way. Prints a table, and writes JSON.
"""

import argparse
import json
import os
import platform
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nybble.models import ModelSource, open_source
from nybble.quant.packing import QuantizedTensor, from_gptq, quantize_head
from nybble.quant.recipe import Recipe

RECIPES = (
    Recipe(),
    Recipe(symmetric=False),
    Recipe(group_size=32),
    Recipe(group_size=128),
    Recipe(act_order="dynamic"),
    Recipe(method="rtn"),
    Recipe(bits=8),
)
RESULTS = Path(__file__).parent / "results" / "quantize.json"
PEER = Path(__file__).parent / "quantize_gptqmodel.py"
WINDOWS, WINDOW_LENGTH = 40, 512


def encoder(source: ModelSource) -> Callable[[str], list[int]]:
    from nybble.runtime.tokenizer import Tokenizer

    tokenizer = Tokenizer(source.tokenizer_files)
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


def perplexity_of(provider: Any, source: ModelSource) -> float:
    from nybble.quant.calibration import evaluation_text
    from nybble.quant.quality import evaluation_windows, logits_function, perplexity

    ids = np.asarray(encoder(source)(evaluation_text()))
    return perplexity(logits_function(provider), evaluation_windows(ids, WINDOWS, WINDOW_LENGTH))


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure_ours(model: str, recipe: Recipe, threads: int) -> dict[str, Any]:
    import torch

    from nybble.quant.calibration import load_calibration
    from nybble.quant.quality import DequantizedModel
    from nybble.quant.quantize import quantize

    torch.set_num_threads(threads)
    start = time.monotonic()
    source = open_source(model)
    calibration = None
    if recipe.method == "gptq":
        calibration = load_calibration(None, encode=encoder(source), recipe=recipe)
    result = quantize(source, recipe, calibration, threads=threads)
    seconds, peak = time.monotonic() - start, peak_bytes()
    return {
        "seconds": seconds,
        "peak_bytes": peak,
        "perplexity": perplexity_of(DequantizedModel(result), source),
        "mean_layer_error": float(np.mean(list(result.layer_errors.values()))),
    }


class GptqFolder:
    """A GPTQ checkpoint in one safetensors file, with the 8-bit embedding and head that ours has."""

    def __init__(self, folder: Path, source: ModelSource, recipe: Recipe) -> None:
        from safetensors import safe_open

        self.spec, self._source, self._recipe = source.spec, source, recipe
        self._format = json.loads((folder / "quantize_config.json").read_text())["checkpoint_format"]
        self._file = safe_open(next(iter(folder.glob("*.safetensors"))), "np")
        self._names = set(self._file.keys())

    def tensor(self, name: str) -> QuantizedTensor | NDArray[np.float32]:
        if name in (self.spec.embedding_name, self.spec.head_name):
            return quantize_head(self._source.tensor(name))
        stem = name.removesuffix(".weight")
        if f"{stem}.qweight" not in self._names:
            return self._source.tensor(name)
        parts = {
            part: self._file.get_tensor(f"{stem}.{part}") for part in ("qweight", "qzeros", "scales", "g_idx")
        }
        bits, group_size = self._recipe.bits, self._recipe.group_size
        return from_gptq(**parts, bits=bits, group_size=group_size, checkpoint_format=self._format, name=name)


def write_for_peer(model: str, recipe: Recipe, folder: Path) -> None:
    """The model as a float32 Hugging Face folder, and the calibration windows beside it."""
    from safetensors.numpy import save_file

    from nybble.quant.calibration import load_calibration

    source = open_source(model)
    config = {**source.config, "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    for name, content in source.tokenizer_files.items():
        (folder / name).write_bytes(content)
    tensors = {name: source.tensor(name) for name in source.spec.tensors()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    calibration = load_calibration(None, encode=encoder(source), recipe=recipe)
    np.save(folder / "calibration.npy", calibration.token_ids)


def measure_gptqmodel(model: str, recipe: Recipe, threads: int, python: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        original, output = Path(name) / "model", Path(name) / "quantized"
        original.mkdir()
        write_for_peer(model, recipe, original)
        settings = {
            "bits": recipe.bits,
            "group_size": recipe.group_size,
            "sym": recipe.symmetric,
            "desc_act": recipe.desc_act,
        }
        command = [python, str(PEER), str(original), str(output), json.dumps(settings)]
        figures = json.loads(run(command, threads).splitlines()[-1])
        source = open_source(model)
        return figures | {"perplexity": perplexity_of(GptqFolder(output, source, recipe), source)}


def run(command: list[str], threads: int) -> str:
    """A child's standard output; its standard error is shown only where it fails."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    environment["GPTQMODEL_CPU_WORKERS"] = str(max(2, threads))  # with fewer it does not start
    child = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if child.returncode:
        sys.exit(f"{' '.join(command[:3])} ... failed:\n{child.stderr[-4000:]}")
    return child.stdout


def describe(recipe: Recipe) -> str:
    words = [recipe.method, f"{recipe.bits} bits", f"group {recipe.group_size}"]
    words.append("symmetric" if recipe.symmetric else "asymmetric")
    if recipe.method == "gptq":
        words.append(f"act-order {recipe.act_order}")
    return ", ".join(words if recipe.clip_search else [*words, "no clip search"])


def show(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("", "seconds", "peak MB", "perplexity", title="Quantization")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        seconds = f"{row['seconds']:.1f}" if "seconds" in row else ""
        peak = f"{row['peak_bytes'] / 1e6:.0f}" if "peak_bytes" in row else ""
        table.add_row(row["name"], seconds, peak, f"{row['perplexity']:.3f}")
    Console().print(table)


def versions() -> dict[str, str]:
    from importlib.metadata import version

    return {"python": platform.python_version()} | {name: version(name) for name in ("numpy", "torch")}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="a Hugging Face folder, a GGUF file, or smollm2")
    parser.add_argument("--recipe", action="append", help="a recipe's settings as JSON; may be repeated")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--gptqmodel-python", help="a Python in which GPTQModel is installed")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child == "reference":
        source = open_source(arguments.model)
        print(json.dumps({"perplexity": perplexity_of(source, source)}))
        return
    if arguments.child:
        recipe = Recipe.from_json(json.loads(arguments.child))
        print(json.dumps(measure_ours(arguments.model, recipe, arguments.threads)))
        return
    recipes = [Recipe.from_json(json.loads(text)) for text in arguments.recipe or ()] or list(RECIPES)
    threads = arguments.threads

    def child(what: str) -> dict[str, Any]:
        command = [sys.executable, __file__, "--model", arguments.model, "--threads", str(threads)]
        figures: dict[str, Any] = json.loads(run([*command, "--child", what], threads).splitlines()[-1])
        return figures

    rows = [{"name": "float32", **child("reference")}]
    for recipe in recipes:
        figures = child(json.dumps(recipe.to_json()))
        rows.append({"name": describe(recipe), "recipe": recipe.to_json(), **figures})
        print(f"{describe(recipe)}: perplexity {figures['perplexity']:.3f}", file=sys.stderr, flush=True)
    if arguments.gptqmodel_python:
        peer = replace(recipes[0], method="gptq")
        figures = measure_gptqmodel(arguments.model, peer, threads, arguments.gptqmodel_python)
        rows.append({"name": f"GPTQModel {figures['version']}, as the first recipe", **figures})
    show(rows)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "command": shlex.join(["python", "benchmarks/quantize.py", *sys.argv[1:]]),
        "model": Path(arguments.model).name,
        "threads": threads,
        "versions": versions(),
        "rows": rows,
    }
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
