"""Is an artifact what its manifest says, and do its halves hold the same numbers?"""

from pathlib import Path

import numpy as np

from ..errors import ModelFormatError
from ..quant.packing import QuantizedTensor, from_gptq, to_gptq
from ..quant.packing_nf4 import Nf4Tensor
from .artifact import (
    CACHE_FOLDER,
    GENAI_GRAPH,
    PAGED_GRAPH,
    Artifact,
    artifact_folder,
    check_size,
    open_artifact,
    present_formats,
)
from .artifact_writer import Report
from .manifest import MANIFEST_NAME, read_manifest
from .safetensors_writer import file_sha256
from .weights import LogicalTensor


def verify_files(path: str | Path, progress: Report | None = None) -> list[str]:
    """Compares every file with the manifest: one line for each that is missing, has another size or content,
    or is not listed. An empty list means that all is well; a half that was deleted is well. What executors
    keep in the folder `cache` is not part of an artifact.

    Raises `ModelFormatError` where there is no artifact or no readable manifest.
    """
    folder = artifact_folder(path)
    manifest, _ = read_manifest(folder)
    present = present_formats(folder, manifest)
    problems = [] if present else [f"{folder}: neither half is there"]
    expected = {n: e for n, e in manifest.files.items() if e.half is None or e.half in present}
    done, total = 0, sum(e.size for e in expected.values())
    for name, entry in expected.items():
        try:
            check_size(folder, name, entry)
            digest = file_sha256(folder / name)
        except ModelFormatError as error:
            problems.append(str(error))
        except OSError as error:
            problems.append(f"{folder / name}: cannot be read: {error.strerror}")
        else:
            if digest != entry.sha256:
                problems.append(
                    f"{folder / name}: its SHA-256 differs from {MANIFEST_NAME}'s: it was changed"
                )
        done += entry.size
        if progress is not None:
            progress("checksums", done, total)
    for file in sorted(p for p in folder.rglob("*") if not p.is_dir()):
        name = file.relative_to(folder).as_posix()
        listed = name in manifest.files or name == MANIFEST_NAME
        if not listed and not name.startswith(f"{CACHE_FOLDER}/"):
            problems.append(f"{file}: is not listed in {MANIFEST_NAME}")
    return problems


def verify_integers(path: str | Path, progress: Report | None = None) -> int:
    """Compares the two halves tensor by tensor: integers, scales, zero points, group sizes, order of the
    columns, and the values of what is not quantized. Returns how many tensors were equal: all.

    Raises `ModelFormatError` naming the first tensor that differs, or where a half is not there.
    """
    artifact = open_artifact(path)
    names, onnx = list(artifact.spec.tensors()), artifact.weights("onnx")
    with artifact.checkpoint() as checkpoint:
        for done, name in enumerate(names, 1):
            difference = _difference(checkpoint.tensor(name), onnx.tensor(name))
            if difference is not None:
                raise ModelFormatError(f"{path}: tensor {name} differs between the halves: {difference}")
            if progress is not None:
                progress("integers", done, len(names))
    return len(names)


def verify_graphs(artifact: Artifact) -> None:
    """Where the ONNX half has two graphs, they are of the same model and refer to the same bytes for each
    tensor. Raises `ModelFormatError`."""
    from .onnx_reader import open_decoder

    if artifact.manifest.onnx_contract != "both":
        return
    paged, genai = (open_decoder(artifact.folder / name) for name in (PAGED_GRAPH, GENAI_GRAPH))
    if (paged.spec, paged.tensors) != (genai.spec, genai.tensors):
        raise ModelFormatError(f"{artifact.folder}: {PAGED_GRAPH} and {GENAI_GRAPH} are of different models")
    places = paged.places()
    for name, place in genai.places().items():
        if places.get(name) != place:
            raise ModelFormatError(
                f"{artifact.folder / GENAI_GRAPH}: {name} lies at {place}; "
                f"{PAGED_GRAPH} has it at {places.get(name)}"
            )


def _difference(one: LogicalTensor, other: LogicalTensor) -> str | None:
    """What differs between two tensors; None if nothing does."""
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        if not isinstance(one, np.ndarray) or not isinstance(other, np.ndarray):
            return "only one is quantized"
        return None if np.array_equal(one, other) else "its values"
    if isinstance(one, Nf4Tensor) != isinstance(other, Nf4Tensor):
        return "only one is in NF4"
    for name in ("bits", "in_features", "group_size"):
        if getattr(one, name) != getattr(other, name):
            return f"{name} is {getattr(one, name)} and {getattr(other, name)}"
    if isinstance(one, Nf4Tensor) or isinstance(other, Nf4Tensor):
        same = np.array_equal(one.scales, other.scales), np.array_equal(one.packed, other.packed)
        return None if all(same) else "its codes" if same[0] else "its scales"
    one, other = _canonical(one), _canonical(other)
    for name, found, expected in (
        ("the order of its columns", one.permutation, other.permutation),
        ("its scales", one.scales, other.scales),
        ("its zero points", one.zero_points, other.zero_points),
        ("its integers", one.packed, other.packed),
    ):
        if (found is None) != (expected is None) or not np.array_equal(found, expected):  # type: ignore[arg-type]
            return name
    return None


def _canonical(tensor: QuantizedTensor) -> QuantizedTensor:
    """The same weight with each group's columns in ascending order: inside a group the order means nothing,
    and the GPTQ layout does not keep it."""
    if tensor.permutation is None:
        return tensor
    parts = to_gptq(tensor, "gptq_v2")
    return from_gptq(
        parts["qweight"],
        parts["qzeros"],
        parts["scales"],
        parts["g_idx"],
        bits=tensor.bits,
        group_size=tensor.group_size,
        checkpoint_format="gptq_v2",
    )
