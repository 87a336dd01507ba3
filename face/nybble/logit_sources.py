"""Where an evaluation's logits come from: a model that runs here, or the unquantized one in torch."""

from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from .benchmarking import linear_operations
from .devices.memory_plan import SCORE_LOGITS_BYTES
from .errors import ModelFormatError
from .loading import Loaded, load
from .models.hub_cache import located
from .models.open import open_source
from .models.source import ModelSource
from .models.spec import ModelSpec
from .runtime.batch import Batch
from .runtime.tokenizer import Tokenizer

# Windows that torch computes together: each call reads and converts every tensor.
TORCH_WINDOWS = 4


class LogitSource(Protocol):
    """A model to ask for the logits of texts. To be closed."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    def rows(self, windows: NDArray[np.int32], window: int, begin: int, end: int) -> NDArray[np.float32]:
        """Logits [end - begin, vocab] of tokens `begin` to `end` of one of the `windows` [N, S], each after
        those before it in the window. A window's tokens are asked for in order, from the first on."""
        ...

    def close(self) -> None: ...


class RuntimeLogits:
    """`LogitSource` over our own runtime: an artifact or a GGUF file as `LLM` opens it, in chunks."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded, self._executor = loaded, loaded.executor
        self.spec, self.tokenizer = loaded.executor.spec, loaded.tokenizer

    @classmethod
    def open(cls, path: str | Path, length: int | None, **opening: Any) -> Self:
        """For windows of `length` tokens, None for the device's context; `opening` are `LLM`'s settings."""
        settings: dict[str, Any] = {
            "device": "auto", "executor": "auto", "format": "auto", "providers": None, "threads": None,
            "memory_budget": None, "kv_dtype": None, "cache": True, "max_model_len": length,
        } | opening  # fmt: skip
        return cls(load(path, max_batch_tokens=None, max_sequences=1, **settings))

    @property
    def length(self) -> int:
        """Tokens of the longest window."""
        return self._loaded.max_model_len

    @property
    def chunk(self) -> int:
        """The most tokens to ask for at once: what the memory plan has logits for."""
        return max(1, SCORE_LOGITS_BYTES // (4 * self.spec.vocab_size))

    @property
    def weight_bytes(self) -> int:
        """Bytes of what every step reads: linear layers and head."""
        return self._executor.weight_bytes

    @property
    def weights(self) -> int:
        """How many weights those are."""
        return linear_operations(self.spec, 1, 1) // 2

    def rows(self, windows: NDArray[np.int32], window: int, begin: int, end: int) -> NDArray[np.float32]:
        layout, groups = self._executor.kv_layout, max(1, len(self.spec.window_groups))
        pages = np.arange(-(-end // layout.page_size), dtype=np.int32)
        return self._executor.step(
            Batch(
                token_ids=np.ascontiguousarray(windows[window, begin:end]),
                cu_seqlens=np.array([0, end - begin], np.int32),
                past_lens=np.array([begin], np.int32),
                block_table=np.tile(pages, (groups, 1, 1)),
                slot_mapping=np.tile(np.arange(begin, end, dtype=np.int32), (groups, 1)),
                logit_rows=np.arange(end - begin, dtype=np.int32),
            )
        )

    def close(self) -> None:
        self._loaded.close()


class TorchLogits:
    """`LogitSource` over a model's own weights in float32: a Hugging Face folder, or what a GGUF file's
    stand for."""

    def __init__(self, source: ModelSource) -> None:
        from .quant.quality import logits_function

        self._source, self._logits_of = source, logits_function(source)
        self.spec = source.spec
        self._first, self._logits = 0, np.empty((0, 0, 0), np.float32)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer(self._source.tokenizer_files)

    def rows(self, windows: NDArray[np.int32], window: int, begin: int, end: int) -> NDArray[np.float32]:
        if not self._first <= window < self._first + len(self._logits):
            self._logits = np.empty((0, 0, 0), np.float32)  # before there are new ones
            self._first = window
            self._logits = np.asarray(self._logits_of(windows[window : window + TORCH_WINDOWS]))
        return self._logits[window - self._first, begin:end]

    def close(self) -> None:
        self._logits = np.empty((0, 0, 0), np.float32)
        self._source.close()


def open_reference(path: str | Path, length: int, **opening: Any) -> LogitSource:
    """What to compare with: an artifact folder runs here, anything else is the model itself, in float32.
    Raises what opening either raises."""
    if Path(located(path), "nybble.json").is_file():
        return RuntimeLogits.open(path, length, **opening)
    source = open_source(path)
    try:
        return TorchLogits(source)
    except BaseException:
        source.close()
        raise


def check_same_tokens(one: LogitSource, other: LogitSource, where: str | Path) -> None:
    """Raises `ModelFormatError` unless both have the same tokens."""
    if one.spec.vocab_size != other.spec.vocab_size or not one.tokenizer.has_tokens_of(other.tokenizer):
        raise ModelFormatError(
            f"{where}: has other tokens, {other.spec.vocab_size} of them; expected the reference's "
            f"{one.spec.vocab_size}"
        )
