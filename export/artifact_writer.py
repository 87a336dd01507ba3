"""Writes the artifact folder, whole or not at all."""

import json
import logging
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

from ..errors import OutputError, SettingError
from ..models.spec import ModelSpec
from ..quant.model import QuantizedModel
from ..quant.packing import HEAD_BITS, HEAD_GROUP_SIZE, CheckpointFormat
from ..quant.recipe import Recipe
from .artifact import GENAI_CONFIG, GENAI_GRAPH, ONNX_FOLDER, QUANTIZE_CONFIG
from .atomic import check_output, check_space, new_folder
from .bnb import bnb_layout, write_bnb
from .bnb_config import BnbConfig
from .checkpoint_writer import layout_bytes
from .genai_config import genai_config
from .gptq import gptq_layout, write_gptq
from .gptq_config import REFUSES_SHORT_GROUPS, GptqConfig
from .manifest import (
    FORMATS,
    MANIFEST_NAME,
    ONNX_CONTRACTS,
    Checkpoint,
    FileEntry,
    Format,
    Manifest,
    OnnxContract,
    check_file_name,
    checkpoint_of,
)
from .safetensors_writer import INDEX_NAME, SHARD_LIMIT, file_sha256
from .weights import QuantizedModelWeights

log = logging.getLogger("nybble.export")

Report = Callable[[str, int, int], None]
CHECKPOINT_FORMATS: tuple[CheckpointFormat, ...] = get_args(CheckpointFormat)
# Beyond the tensors: headers, the graph, the tokenizer, paddings.
SPACE_MARGIN_BYTES = 8 << 20


def check_formats(formats: Sequence[str] | None, recipe: Recipe) -> tuple[Format, ...]:
    """The formats in their fixed order; None is all that the recipe's weights have. Raises `SettingError` for
    an unknown one or none, `MissingDependencyError` where writing one needs a package that is not installed.
    Worth calling before hours of quantizing, like `check_output`."""
    possible: tuple[Format, ...] = (checkpoint_of(recipe), "onnx")
    chosen = tuple(f for f in possible if formats is None or f in formats)
    unknown = [f for f in formats or () if f not in possible]
    if unknown or not chosen:
        found, why = repr(unknown[0]) if unknown else "empty", ""
        if unknown and unknown[0] in FORMATS:
            why = f" with method {recipe.method}"
        raise SettingError(f"formats is {found}; expected {' or '.join(possible)}, or both{why}")
    if "onnx" in chosen:
        import_module(".onnx_dependency", __package__)
    return chosen


def check_onnx_contract(contract: str, formats: Sequence[str]) -> OnnxContract:
    """The contract, checked. Raises `SettingError` for an unknown one, and for another than the default where
    no ONNX half is written."""
    if contract not in ONNX_CONTRACTS:
        raise SettingError(f"onnx_contract is {contract!r}; expected {', '.join(ONNX_CONTRACTS)}")
    if contract != "paged" and "onnx" not in formats:
        raise SettingError(f"onnx_contract is {contract!r}, but formats has no onnx")
    return ONNX_CONTRACTS[ONNX_CONTRACTS.index(contract)]


def artifact_bytes(spec: ModelSpec, recipe: Recipe) -> dict[Format, int]:
    """About how many bytes each half takes on the disk, known before anything is quantized."""
    half = checkpoint_of(recipe)
    layout = bnb_layout(spec, recipe) if half == "bnb" else gptq_layout(spec, recipe)
    onnx = 0
    for name, shape in spec.tensors().items():
        if name in spec.float_names:
            onnx += 4 * math.prod(shape)
        elif name in (spec.embedding_name, spec.head_name):
            onnx += _quantized_bytes(shape, HEAD_BITS, HEAD_GROUP_SIZE)
        else:
            form = recipe.format_of(name)
            onnx += _quantized_bytes(shape, form.tensor_bits, form.group_size)
    return {half: layout_bytes(layout), "onnx": onnx}


def _quantized_bytes(shape: tuple[int, ...], bits: int, group_size: int) -> int:
    """Bytes of a weight [out, in] in the ONNX half: codes, float32 scales, and zero points at most."""
    out, columns = shape
    blocks = -(-columns // (128 if group_size == -1 else group_size))
    return out * (-(-columns * bits // 8) + blocks * 5)


def write_artifact(
    model: QuantizedModel,
    out: Path,
    *,
    formats: Sequence[str] | None = None,
    checkpoint_format: str = "auto",
    onnx_contract: str = "paged",
    overwrite: bool = False,
    progress: Report | None = None,
    quality: Mapping[str, Any] | None = None,
    shard_limit: int = SHARD_LIMIT,
) -> Manifest:
    """Writes the artifact folder `out`. Until it is whole, the previous one or none is there.

    `formats` are the halves: the checkpoint that the recipe's weights have, "gptq" or "bnb", and "onnx"; None
    is both. `checkpoint_format` "auto" is "gptq", and "gptq_v2" where zero points are stored: GPTQModel
    refuses those in the older format. `onnx_contract` says whose graphs the ONNX half has: "paged"
    `OrtExecutor`'s, "genai" onnxruntime-genai's, or "both". `progress(stage, done, total)` counts bytes.
    `quality` is the report for the manifest, in values that JSON has. `shard_limit` is the largest
    safetensors file in bytes.

    Raises `OutputError`: `out` exists and `overwrite` is off, or is not an artifact; the disk is full or
    cannot be written; a tensor is missing. `SettingError` for an unknown format or contract,
    `MissingDependencyError` for a format whose package is not installed, `UnsupportedModelError` for a model
    that the contract cannot express.
    """
    chosen = check_formats(formats, model.recipe)
    contract = check_onnx_contract(onnx_contract, chosen)
    resolved = _resolved_checkpoint_format(model, checkpoint_format)
    report = progress or (lambda stage, done, total: None)
    real = check_output(out, overwrite)
    for name in model.tokenizer_files:
        check_file_name(name, f"{out}: tokenizer file", OutputError)
    needed = artifact_bytes(model.spec, model.recipe)
    check_space(real, sum(needed[f] for f in chosen) + SPACE_MARGIN_BYTES)
    checkpoint = checkpoint_of(model.recipe) if checkpoint_of(model.recipe) in chosen else None
    refused = _refusals(model, resolved) if checkpoint == "gptq" else {}
    for reason in dict.fromkeys(refused.values()):
        loaders = " and ".join(loader for loader in refused if refused[loader] == reason)
        log.warning("%s: %s will not load the GPTQ half: %s", out, loaders, reason)
    with new_folder(out, overwrite) as folder:
        _write_common(model, folder, checkpoint, resolved)
        if checkpoint is not None:
            done = 0

            def advance(written: int) -> None:
                nonlocal done
                done += written
                report(checkpoint, done, needed[checkpoint])

            if checkpoint == "bnb":
                write_bnb(model, folder, shard_limit=shard_limit, advance=advance)
            else:
                write_gptq(
                    model, folder, checkpoint_format=resolved, shard_limit=shard_limit, advance=advance
                )
        if "onnx" in chosen:
            from .onnx_contract import CONTRACTS
            from .onnx_writer import write_onnx

            report("onnx", 0, needed["onnx"])
            contracts = CONTRACTS if contract == "both" else (contract,)
            write_onnx(QuantizedModelWeights(model), folder / ONNX_FOLDER, contracts=contracts)
            if contract != "paged":
                _write_json(folder / GENAI_CONFIG, genai_config(model, GENAI_GRAPH))
            report("onnx", needed["onnx"], needed["onnx"])
        manifest = Manifest(
            source_origin=model.origin,
            source_digest=model.source_digest,
            recipe=model.recipe,
            formats=chosen,
            files=_file_entries(folder, checkpoint, report),
            created_with=_versions(),
            layer_errors=model.layer_errors,
            starved_experts=model.starved_experts,
            calibration_digest=model.calibration_digest,
            quality=quality,
            refused_by=refused,
            onnx_contract=contract,
        )
        (folder / MANIFEST_NAME).write_bytes(manifest.to_bytes())
    return manifest


def _resolved_checkpoint_format(model: QuantizedModel, choice: str) -> CheckpointFormat:
    if choice == "auto":
        return "gptq" if _symmetric(model.recipe) else "gptq_v2"
    if choice not in CHECKPOINT_FORMATS:
        raise SettingError(f"checkpoint_format is {choice!r}; expected auto, gptq or gptq_v2")
    return CHECKPOINT_FORMATS[CHECKPOINT_FORMATS.index(choice)]


def _symmetric(recipe: Recipe) -> bool:
    """Whether no linear layer has zero points of its own."""
    return all(form.symmetric for form in recipe.all_formats)


def _refusals(model: QuantizedModel, checkpoint_format: CheckpointFormat) -> dict[str, str]:
    """The loaders that are known not to load this GPTQ half, and why."""
    linears = [x for layer in range(model.spec.num_layers) for x in model.spec.linears(layer)]
    sizes = {(x.in_features, model.recipe.format_of(x.name).group_size) for x in linears}
    short = sorted((n, size) for n, size in sizes if size != -1 and n % size)
    refused = {}
    if short:
        reason = f"the group size {short[0][1]} does not divide an input size of {short[0][0]}"
        refused = dict.fromkeys(REFUSES_SHORT_GROUPS, reason)
    if model.spec.fused_projections:
        refused["GPTQModel"] = (
            "gate_up_proj in one piece, as transformers' class has it; it expects two layers"
        )
    if not _symmetric(model.recipe) and checkpoint_format == "gptq":
        refused["GPTQModel"] = "zero points in the gptq checkpoint format, which it takes from itself only"
    return refused


def _write_common(
    model: QuantizedModel, folder: Path, checkpoint: Checkpoint | None, checkpoint_format: CheckpointFormat
) -> None:
    from .. import __version__

    config = {k: v for k, v in model.config.items() if k not in ("_name_or_path", "quantization_config")}
    # transformers 5 reads dtype, older ones and vLLM torch_dtype.
    config |= {"dtype": "float16", "torch_dtype": "float16"}
    if checkpoint == "bnb":
        config["quantization_config"] = BnbConfig.from_recipe(model.recipe).to_json()
    elif checkpoint == "gptq":
        settings = GptqConfig.from_recipe(model.recipe, model.spec, checkpoint_format)
        quantization = settings.to_json(model.recipe, __version__)
        config["quantization_config"] = quantization
        _write_json(folder / QUANTIZE_CONFIG, quantization)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", model.generation_config)
    for name, content in sorted(model.tokenizer_files.items()):
        (folder / name).write_bytes(content)


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _file_entries(folder: Path, checkpoint: Checkpoint | None, report: Report) -> dict[str, FileEntry]:
    paths = sorted(p for p in folder.rglob("*") if p.is_file())
    sizes = {p: p.stat().st_size for p in paths}
    total, done, entries = sum(sizes.values()), 0, {}
    for path in paths:
        name = path.relative_to(folder).as_posix()
        entries[name] = FileEntry(sizes[path], file_sha256(path), _half_of(name, checkpoint))
        done += sizes[path]
        report("checksums", done, total)
    return entries


def _half_of(name: str, checkpoint: Checkpoint | None) -> Format | None:
    if name.startswith(f"{ONNX_FOLDER}/") or name == GENAI_CONFIG:
        return "onnx"
    return checkpoint if name.endswith(".safetensors") or name in (INDEX_NAME, QUANTIZE_CONFIG) else None


def _versions() -> dict[str, str]:
    """What the weights' bytes may depend on: the interpreter, and the libraries that computed them."""
    from importlib.metadata import PackageNotFoundError, version  # brings in much that running does not need

    from .. import __version__

    found = {"nybble": __version__, "python": platform.python_version()}
    for library in ("numpy", "torch", "transformers", "tokenizers", "onnx-ir"):
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            continue
    return found
