"""`GenaiGraph`: steps a graph of the genai contract, to check what was written for others."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelFormatError
from ..export.genai_config import INPUT_NAMES, OUTPUT_NAMES
from ..export.onnx_dependency import ir
from ..export.onnx_graph import set_accuracy_level
from ..export.onnx_reader import open_decoder
from .ort_session import choose_providers, make_session


class GenaiGraph:
    """One sequence's keys and values, and the graph that adds to them."""

    def __init__(self, path: Path, *, threads: int | None = None, accuracy_level: int | None = None) -> None:
        """Opens a `genai.onnx`; `accuracy_level` as of `OrtExecutor.from_file`. Raises `ModelFormatError` for
        a damaged file or one of another contract."""
        file = open_decoder(path)
        if file.contract != "genai":
            raise ModelFormatError(f"{path.name}: has the {file.contract} contract; expected genai")
        if accuracy_level is not None:
            set_accuracy_level(file.model, accuracy_level)
        self.spec = file.spec
        self._session = make_session(
            ir.to_proto(file.model).SerializeToString(),
            providers=choose_providers(["CPUExecutionProvider"]),
            threads=threads,
            folder=str(path.resolve().parent),
            what="the genai graph",
        )
        kinds = [(kind, layer) for layer in range(self.spec.num_layers) for kind in ("key", "value")]
        self._past = [INPUT_NAMES[f"past_{kind}_names"] % layer for kind, layer in kinds]
        self._present = [OUTPUT_NAMES[f"present_{kind}_names"] % layer for kind, layer in kinds]
        self.reset()

    def reset(self) -> None:
        """Forgets the sequence."""
        empty = np.zeros((1, self.spec.num_kv_heads, 0, self.spec.head_dim), np.float32)
        self._cache: list[NDArray[Any]] = [empty] * len(self._past)

    def step(self, token_ids: list[int]) -> NDArray[np.float32]:
        """Adds tokens, at least one, to the sequence; logits [vocab] of what follows the last."""
        past = self._cache[0].shape[2]
        total = past + len(token_ids)
        feeds = {
            INPUT_NAMES["input_ids"]: np.array([token_ids], np.int64),
            INPUT_NAMES["attention_mask"]: np.ones((1, total), np.int64),
            INPUT_NAMES["position_ids"]: np.arange(past, total, dtype=np.int64)[None],
            **dict(zip(self._past, self._cache, strict=True)),
        }
        logits, *self._cache = self._session.run([OUTPUT_NAMES["logits"], *self._present], feeds)
        return np.asarray(logits[0, 0])
