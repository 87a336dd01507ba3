"""`quantize`: a model in, an artifact folder out."""

import os
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import SettingError
from .quant.recipe import Recipe
from .quant.recipe_files import DEFAULT, load_recipe

if TYPE_CHECKING:
    from .export.manifest import Manifest

Report = Callable[[str, int, int], None]
# The time in a calibration text, where a chat template writes it: the text is the same on any day.
TEMPLATES_SEE = datetime(2026, 1, 1)


def quantize(
    src: str | Path,
    out: str | Path,
    *,
    recipe: Recipe | str | Path = DEFAULT,
    calibration: str | Path | Sequence[str | Path] | None = None,
    adapter: str | Path | None = None,
    formats: Sequence[str] | None = None,
    checkpoint_format: str = "auto",
    onnx_contract: str = "paged",
    overwrite: bool = False,
    threads: int | None = None,
    resume: bool = False,
    progress: Report | None = None,
    **settings: Any,
) -> "Manifest":
    """Quantizes `src` (a Hugging Face folder, a GGUF file, the hub id of a model in the local Hugging Face
    cache, or the alias `smollm2`) and writes the artifact folder `out`: the old one or none is there until
    the new one is whole.

    `recipe` is a `Recipe`, the name of one that comes with Nybble ("fast", "balanced", "best") or a TOML
    file. `settings` are `Recipe`'s fields and replace the recipe's: `bits=8`, `group_size=128`, ... Bits that
    are neither 3, 4 nor 8 are a budget, on average per weight with scales and zero points; it is spent layer
    by layer, and group sizes are chosen with it. `formats` are the halves to write; by default the
    checkpoint, which is "gptq" or for the methods nf4 and int8 "bnb", and "onnx". `calibration` is a file of
    UTF-8 text, or JSONL with `text` or `messages`; "self", what the model itself writes; "default", CPython's
    own documentation; or several of these, each of which may be followed by "=SHARE", its share of the
    windows. `adapter` is a folder with a LoRA in PEFT's format, merged first. `onnx_contract` says who runs
    the ONNX half: "paged" for `OrtExecutor`, "genai" for onnxruntime-genai, or "both". `progress(stage, done,
    total)` is called as work proceeds. Returns the manifest.

    Finished layers are kept in a hidden folder beside `out` until the artifact is there, once half a minute
    went into them. With `resume` a run that was stopped is repeated from there, with the same bytes; the same
    settings are needed. Without, what was kept is removed; so is what a run left that was killed when its
    artifact was there.

    Raises `NybbleError`'s subclasses; nothing but that folder is left behind then.
    """
    from .export import check_formats, check_onnx_contract, check_output, write_artifact
    from .export.artifact import GENAI_GRAPH
    from .export.genai_config import genai_config
    from .export.manifest import MANIFEST_NAME
    from .models import open_source
    from .own_text import own_text
    from .quant.checkpoint import Checkpoint, discard_finished, work_folder
    from .quant.mixture import DEFAULT as DEFAULT_TEXT
    from .quant.mixture import load_mixture, parse_shares
    from .quant.quantize import check_recipe
    from .quant.quantize import quantize as quantize_model
    from .runtime.tokenizer import Tokenizer

    unknown = sorted(set(settings) - set(Recipe.__dataclass_fields__))
    if unknown:
        raise SettingError(f"unknown recipe settings: {', '.join(unknown)}")
    chosen = (recipe if isinstance(recipe, Recipe) else load_recipe(str(recipe))).changed(**settings)
    given = [calibration] if isinstance(calibration, str | Path) else calibration
    if given and not chosen.needs_text:
        raise SettingError(f"calibration is {str(given[0])!r}, but method {chosen.method} needs none")
    texts = parse_shares(given or [DEFAULT_TEXT])
    out = Path(out)
    check_onnx_contract(onnx_contract, check_formats(formats, chosen))
    with suppress(ValueError):  # of what can be no path, which is refused next
        real = Path(os.path.realpath(out))
        discard_finished(work_folder(real), real / MANIFEST_NAME)
    work = work_folder(check_output(out, overwrite))
    with Checkpoint(work, resume=resume) as checkpoint:
        with closing(open_source(src, adapter)) as source:
            if onnx_contract != "paged":
                genai_config(source, GENAI_GRAPH)  # what it refuses, it refuses before the work
            check_recipe(chosen, source.spec)
            text = None
            if chosen.needs_text:
                tokenizer = Tokenizer(source.tokenizer_files, TEMPLATES_SEE)
                text = load_mixture(
                    texts,
                    encode=lambda text: tokenizer.encode(text, add_special_tokens=False, parse_special=True),
                    render=tokenizer.render_chat,
                    recipe=chosen,
                    own_text=lambda tokens: own_text(
                        source, tokenizer, tokens, seed=chosen.seed, threads=threads, progress=progress
                    ),
                )
            model = quantize_model(
                source, chosen, text, progress=progress, threads=threads, checkpoint=checkpoint
            )
        manifest = write_artifact(
            model,
            out,
            formats=formats,
            checkpoint_format=checkpoint_format,
            onnx_contract=onnx_contract,
            overwrite=overwrite,
            progress=progress,
        )
        checkpoint.finish()
    return manifest
