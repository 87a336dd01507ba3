"""The contract between the engine and whatever runs the decoder."""

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ..models.spec import ModelSpec
from .batch import Batch

KvDtype = Literal["f32", "f16", "int8"]


@dataclass(frozen=True)
class KvLayout:
    """The executor's cache: `num_blocks` pages of `page_size` tokens, the same pages in every layer."""

    num_blocks: int
    page_size: int
    kv_dtype: KvDtype
    bytes_per_block: int  # all layers together


class Executor(Protocol):
    """Runs the decoder on one batch. Holds the weights and the cache; knows nothing of requests."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that every step reads."""
        ...

    @property
    def kv_layout(self) -> KvLayout: ...

    def allocate_kv(self, num_blocks: int, page_size: int, kv_dtype: KvDtype) -> None: ...

    def step(self, batch: Batch) -> NDArray[np.float32]:
        """Writes the new tokens' keys and values into the cache and returns logits [R, vocab] float32."""
        ...

    def copy_blocks(self, src: NDArray[np.int32], dst: NDArray[np.int32]) -> None: ...

    def read_blocks(self, ids: NDArray[np.int32]) -> bytes: ...

    def write_blocks(self, ids: NDArray[np.int32], data: bytes) -> None: ...

    def close(self) -> None: ...
