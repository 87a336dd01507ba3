"""Quality figures of logits, wherever they come from."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .forward import TensorProvider, logits
from .model import QuantizedModel
from .packing import QuantizedTensor, quantize_head
from .packing_nf4 import AnyQuantized

if TYPE_CHECKING:
    from torch import Tensor

# Token ids [B, S] to logits [B, S, vocab] float32, a numpy array or a torch tensor.
LogitsFunction = Callable[[NDArray[np.integer]], Any]


class DequantizedModel:
    """A `QuantizedModel`'s tensors as every runtime sees them: the linear layers' integers, the 8-bit form of
    embedding and head, everything else float16."""

    def __init__(self, model: QuantizedModel) -> None:
        self.spec = model.spec
        self._model = model
        self._eight_bits: dict[str, QuantizedTensor] = {}

    def tensor(self, name: str) -> AnyQuantized | NDArray[np.float32]:
        tensor = self._model.tensors[name]
        if not isinstance(tensor, np.ndarray):
            return tensor
        if name in (self.spec.embedding_name, self.spec.head_name):
            if name not in self._eight_bits:
                self._eight_bits[name] = quantize_head(tensor, name)
            return self._eight_bits[name]
        return tensor.astype(np.float32)


def logits_function(provider: TensorProvider) -> "Callable[[NDArray[np.integer]], Tensor]":
    """The torch float32 logits of a model given by its tensors (a `ModelSource`, a `DequantizedModel`, ...).
    Each call reads every tensor once."""
    return lambda token_ids: logits(provider, token_ids)


def evaluation_windows(token_ids: NDArray[np.integer], windows: int, length: int) -> NDArray[np.int64]:
    """The first `windows` windows of `length` tokens, [windows, length]."""
    return np.asarray(token_ids[: windows * length], np.int64).reshape(windows, length)


def perplexity(logits_of: LogitsFunction, windows: NDArray[np.integer], *, batch: int = 4) -> float:
    """exp of the mean cross entropy of each window's tokens after its first, given those before it in the
    window; windows [N, S] go to `logits_of` `batch` at a time."""
    total = 0.0
    for start in range(0, len(windows), batch):
        part = windows[start : start + batch]
        chosen, normalizer = _target_and_normalizer(logits_of(part), part)
        total += float((normalizer - chosen).sum())
    return float(np.exp(total / (len(windows) * (windows.shape[1] - 1))))


def _target_and_normalizer(
    logits: Any, token_ids: NDArray[np.integer]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The next token's logit and the logarithm of the sum of exponentials, [B, S - 1] each."""
    chosen = np.empty((len(token_ids), token_ids.shape[1] - 1))
    normalizer = np.empty_like(chosen)
    for row, ids in enumerate(token_ids):
        scores = np.asarray(logits[row])[:-1].astype(np.float32)
        chosen[row] = np.take_along_axis(scores, ids[1:, None].astype(np.int64), 1)[:, 0]
        normalizer[row] = log_sum_exp(scores)
    return chosen, normalizer


def log_sum_exp(scores: NDArray[np.float32]) -> NDArray[np.float64]:
    """Over the last axis."""
    top = scores.max(axis=-1, keepdims=True)
    sums = np.exp(scores - top).sum(axis=-1, dtype=np.float64)
    return np.asarray(np.log(sums) + top[..., 0])


def kl_divergence(reference: Any, other: Any) -> NDArray[np.float64]:
    """KL(reference ‖ other) in nats at each position, [...], of logits [..., vocab] float32."""
    p, q = (np.asarray(x, np.float32) for x in (reference, other))
    p_log = p - log_sum_exp(p)[..., None]
    q_log = q - log_sum_exp(q)[..., None]
    return np.asarray((np.exp(p_log) * (p_log - q_log)).sum(axis=-1))
