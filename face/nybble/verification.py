"""`verify`: is an artifact whole, and do its halves mean the same?"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .errors import ModelFormatError

if TYPE_CHECKING:
    from .runtime.ort_executor import OrtExecutor

Report = Callable[[str, int, int], None]

WINDOW_TOKENS = 256
MAX_MEAN_KL = 1e-4


@dataclass(frozen=True)
class Verification:
    """What was checked. The figures are None where only one half is there."""

    files: int
    tensors: int | None
    mean_kl: float | None  # of the two halves' next-token distributions, in nats
    top1_agreement: float | None  # share of positions with the same most likely token


def verify(path: str | Path, *, threads: int | None = None, progress: Report | None = None) -> Verification:
    """Checks every file against the manifest; that the integers, scales and zero points of both halves are
    equal; that the logits of both halves, with activations in float32, agree on prose to a mean KL divergence
    under 1e-4; and that packed weights that are kept are those of the artifact.

    Raises `ModelFormatError` with the first thing that is wrong.
    """
    from .export import open_artifact, verify_files, verify_integers
    from .runtime.packed_cache import check_packed

    problems = verify_files(path, progress)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ModelFormatError(problems[0] + more)
    artifact = open_artifact(path)
    check_packed(artifact.folder, artifact.digest, artifact.spec, artifact.weights)
    files = len(artifact.manifest.files)
    if len(artifact.formats) < 2:
        return Verification(files, None, None, None)
    tensors = verify_integers(path, progress)
    kl, agreement = compare_halves(path, threads=threads)
    if not kl < MAX_MEAN_KL:
        raise ModelFormatError(
            f"{path}: the halves' logits differ: mean KL divergence {kl:.2e}, expected under {MAX_MEAN_KL:g}"
        )
    return Verification(files, tensors, kl, agreement)


def compare_halves(path: str | Path, *, threads: int | None = None) -> tuple[float, float]:
    """Mean KL divergence between the halves' distributions over a window of prose, and the share of positions
    with the same most likely token; activations in float32."""
    from .export import open_artifact
    from .quant.calibration import evaluation_text
    from .runtime.ort_executor import OrtExecutor
    from .runtime.tokenizer import Tokenizer

    artifact = open_artifact(path)
    tokenizer = Tokenizer(artifact.tokenizer_files)
    length = min(WINDOW_TOKENS, artifact.spec.max_position)
    # A text's start is enough for its first tokens.
    ids = tokenizer.encode(evaluation_text()[: length * 16], add_special_tokens=False)[:length]
    with OrtExecutor.from_file(artifact.onnx_path, threads=threads, accuracy_level=0) as executor:
        one = _log_probabilities(executor, ids)
    with OrtExecutor.from_weights(artifact.weights("gptq"), threads=threads, accuracy_level=0) as executor:
        other = _log_probabilities(executor, ids)
    kl = (np.exp(one) * (one - other)).sum(axis=1).mean()
    return float(kl), float((one.argmax(axis=1) == other.argmax(axis=1)).mean())


def _log_probabilities(executor: "OrtExecutor", ids: list[int]) -> NDArray[np.float64]:
    """[tokens, vocab]: of the next token after each of `ids`, run as one prompt."""
    from .runtime.batch import prompt_batch

    page_size = 16
    blocks = -(-len(ids) // page_size)
    executor.allocate_kv(blocks, page_size, "f32")
    logits = executor.step(prompt_batch(ids, len(executor.spec.window_groups) or 1, page_size)).astype(
        np.float64
    )
    logits -= logits.max(axis=1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return logits
