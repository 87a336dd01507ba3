"""`quantize`: a model in, an artifact folder out."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import SettingError
from .quant.recipe import Recipe

if TYPE_CHECKING:
    from .export.manifest import Manifest

Report = Callable[[str, int, int], None]


def quantize(
    src: str | Path,
    out: str | Path,
    *,
    recipe: Recipe | None = None,
    calibration: str | Path | None = None,
    adapter: str | Path | None = None,
    formats: Sequence[str] = ("gptq", "onnx"),
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

    `settings` are `Recipe`'s fields and replace those of `recipe`: `bits=8`, `group_size=128`, ...
    `calibration` is a file of UTF-8 text, or JSONL with `text` or `messages`; by default CPython's own
    documentation. `adapter` is a folder with a LoRA in PEFT's format, merged first. `onnx_contract` says who
    runs the ONNX half: "paged" for `OrtExecutor`, "genai" for onnxruntime-genai, or "both".
    `progress(stage, done, total)` is called as work proceeds. Returns the manifest.

    Finished layers are kept in a hidden folder beside `out` until the artifact is there, once half a minute
    went into them. With `resume` a run that was stopped is repeated from there, with the same bytes; the same
    settings are needed. Without, what was kept is removed.

    Raises `NybbleError`'s subclasses; nothing but that folder is left behind then.
    """
    from .export import check_formats, check_onnx_contract, check_output, write_artifact
    from .export.artifact import GENAI_GRAPH
    from .export.genai_config import genai_config
    from .models import open_source
    from .quant.calibration import load_calibration
    from .quant.checkpoint import discard, work_folder
    from .quant.quantize import quantize as quantize_model
    from .runtime.tokenizer import Tokenizer

    unknown = sorted(set(settings) - set(Recipe.__dataclass_fields__))
    if unknown:
        raise SettingError(f"unknown recipe settings: {', '.join(unknown)}")
    chosen = replace(recipe or Recipe(), **settings)
    out = Path(out)
    check_onnx_contract(onnx_contract, check_formats(formats))
    work = work_folder(check_output(out, overwrite))
    source = open_source(src, adapter)
    try:
        if onnx_contract != "paged":
            genai_config(source, GENAI_GRAPH)  # what it refuses, it refuses before the work
        text = None
        if chosen.method == "gptq":
            tokenizer = Tokenizer(source.tokenizer_files)
            text = load_calibration(
                Path(calibration) if calibration is not None else None,
                encode=lambda text: tokenizer.encode(text, add_special_tokens=False, parse_special=True),
                render=tokenizer.render_chat,
                recipe=chosen,
            )
        model = quantize_model(
            source, chosen, text, progress=progress, threads=threads, work=work, resume=resume
        )
    finally:
        source.close()
    manifest = write_artifact(
        model,
        out,
        formats=formats,
        checkpoint_format=checkpoint_format,
        onnx_contract=onnx_contract,
        overwrite=overwrite,
        progress=progress,
    )
    discard(work)
    return manifest
