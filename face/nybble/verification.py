"""`verify`: is an artifact whole, and do its halves mean the same?"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .errors import ModelFormatError
from .export.artifact import GENAI_GRAPH
from .models.hub_cache import located
from .records import dataclass

if TYPE_CHECKING:
    from .export.artifact import Artifact
    from .runtime.ort_executor import OrtExecutor

Report = Callable[[str, int, int], None]

WINDOW_TOKENS = 256
MAX_MEAN_KL = 1e-4
GENAI_STEPS = 16  # single tokens after a prompt


@dataclass(frozen=True)
class Verification:
    """What was checked. The figures are None where only one half is there, the last one where the ONNX half
    has no graph for onnxruntime-genai."""

    files: int
    tensors: int | None
    mean_kl: float | None  # of the two halves' next-token distributions, in nats
    top1_agreement: float | None  # share of positions with the same most likely token
    genai_kl: float | None  # mean KL divergence of that graph's distributions


def verify(path: str | Path, *, threads: int | None = None, progress: Report | None = None) -> Verification:
    """Checks every file of an artifact, a folder or a hub id, against the manifest; that the integers, scales
    and zero points of both halves are equal; that the logits of both halves, and of onnxruntime-genai's graph
    where there is one, with activations in float32, agree on prose to a mean KL divergence under 1e-4; and
    that packed weights that are kept are those of the artifact.

    Raises `ModelFormatError` with the first thing that is wrong.
    """
    from .export import open_artifact, verify_files, verify_graphs, verify_integers
    from .runtime.packed_cache import check_packed

    path = located(path)
    problems = verify_files(path, progress)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ModelFormatError(problems[0] + more)
    artifact = open_artifact(path)
    check_packed(artifact.folder, artifact.digest, artifact.spec, artifact.weights)
    files = len(artifact.manifest.files)
    tensors = kl = agreement = genai_kl = None
    both = len(artifact.formats) == 2
    if both:
        tensors = verify_integers(path, progress)
    has_genai = "onnx" in artifact.formats and artifact.manifest.onnx_contract != "paged"
    if has_genai:
        verify_graphs(artifact)
    if both or has_genai:
        ids = _prose(artifact)
        expected = _onnx_log_probabilities(artifact, ids, threads)
        if both:
            kl, agreement = _compare(
                "the halves' logits",
                artifact,
                expected,
                _checkpoint_log_probabilities(artifact, ids, threads),
            )
        if has_genai:
            found = _genai_log_probabilities(artifact, ids, threads)
            genai_kl, _ = _compare(f"the logits of {GENAI_GRAPH}", artifact, expected[-len(found) :], found)
    return Verification(files, tensors, kl, agreement, genai_kl)


def _compare(
    what: str, artifact: "Artifact", one: NDArray[np.float64], other: NDArray[np.float64]
) -> tuple[float, float]:
    """Mean KL divergence of two sets of log-probabilities [n, vocab], and the share of rows with the same
    most likely token. Raises `ModelFormatError` where the divergence is too large."""
    kl = float((np.exp(one) * (one - other)).sum(axis=1).mean())
    if not kl < MAX_MEAN_KL:
        raise ModelFormatError(
            f"{artifact.folder}: {what} differ: mean KL divergence {kl:.2e}, expected under {MAX_MEAN_KL:g}"
        )
    return kl, float((one.argmax(axis=1) == other.argmax(axis=1)).mean())


def _prose(artifact: "Artifact") -> list[int]:
    """The first tokens of the evaluation text."""
    from .quant.calibration import evaluation_text
    from .runtime.tokenizer import Tokenizer

    length = min(WINDOW_TOKENS, artifact.spec.max_position)
    # A text's start is enough for its first tokens.
    text = evaluation_text()[: length * 16]
    return Tokenizer(artifact.tokenizer_files).encode(text, add_special_tokens=False)[:length]


def _onnx_log_probabilities(artifact: "Artifact", ids: list[int], threads: int | None) -> NDArray[np.float64]:
    from .runtime.ort_executor import OrtExecutor

    settings: dict[str, Any] = {"threads": threads, "accuracy_level": 0}
    with (
        OrtExecutor.from_file(artifact.onnx_path, **settings)
        if artifact.has_paged_graph
        else OrtExecutor.from_weights(artifact.weights("onnx"), **settings)
    ) as executor:
        return _log_probabilities(executor, ids)


def _checkpoint_log_probabilities(
    artifact: "Artifact", ids: list[int], threads: int | None
) -> NDArray[np.float64]:
    from .export.manifest import checkpoint_of
    from .runtime.ort_executor import OrtExecutor

    weights = artifact.weights(checkpoint_of(artifact.manifest.recipe))
    with OrtExecutor.from_weights(weights, threads=threads, accuracy_level=0) as executor:
        return _log_probabilities(executor, ids)


def _genai_log_probabilities(
    artifact: "Artifact", ids: list[int], threads: int | None
) -> NDArray[np.float64]:
    """Of the last tokens: after a prompt, and a token at a time after that."""
    from .runtime.ort_genai import GenaiGraph

    graph = GenaiGraph(artifact.folder / GENAI_GRAPH, threads=threads, accuracy_level=0)
    steps = min(GENAI_STEPS, len(ids) - 1)
    prompt, rest = ids[: len(ids) - steps], ids[len(ids) - steps :]
    return _log_softmax(np.stack([graph.step(prompt), *(graph.step([token]) for token in rest)]))


def _log_probabilities(executor: "OrtExecutor", ids: list[int]) -> NDArray[np.float64]:
    """[tokens, vocab]: of the next token after each of `ids`, run as one prompt."""
    from .runtime.batch import prompt_batch

    page_size = 16
    blocks = -(-len(ids) // page_size)
    executor.allocate_kv(blocks, page_size, "f32")
    return _log_softmax(executor.step(prompt_batch(ids, len(executor.spec.window_groups) or 1, page_size)))


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    exact = logits.astype(np.float64)
    exact -= exact.max(axis=1, keepdims=True)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    return exact
