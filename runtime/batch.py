"""One step's input: a packed, variable-length batch."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Batch:
    """What every executor takes; `com.microsoft.PagedAttention`'s own input contract. T new tokens of B
    sequences, G groups of layers that share a window, R rows whose logits are wanted."""

    token_ids: NDArray[np.int32]  # [T] all new tokens, sequence after sequence
    cu_seqlens: NDArray[np.int32]  # [B + 1] where each sequence's tokens begin
    past_lens: NDArray[np.int32]  # [B] tokens of each sequence already in the cache
    block_table: NDArray[np.int32]  # [G, B, max_blocks] pages of each sequence, -1 unmapped
    slot_mapping: NDArray[np.int32]  # [G, T] flat cache slot of each new token, -1 to skip the write
    logit_rows: NDArray[np.int32]  # [R] rows of T whose logits are wanted
