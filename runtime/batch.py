"""One step's input: a packed, variable-length batch."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..records import dataclass


@dataclass(frozen=True, eq=False)
class Batch:
    """What every executor takes; `com.microsoft.PagedAttention`'s own input contract. T new tokens of B
    sequences, G groups of layers that share a window, R rows whose logits are wanted. In a group no slot is
    written twice, and no page by two sequences."""

    token_ids: NDArray[np.int32]  # [T] all new tokens, sequence after sequence
    cu_seqlens: NDArray[np.int32]  # [B + 1] where each sequence's tokens begin
    past_lens: NDArray[np.int32]  # [B] tokens of each sequence already in the cache
    block_table: NDArray[np.int32]  # [G, B, max_blocks] pages of each sequence, -1 unmapped
    slot_mapping: NDArray[np.int32]  # [G, T] flat cache slot of each new token, -1 to skip the write
    logit_rows: NDArray[np.int32]  # [R] rows of T whose logits are wanted
    # Of each row only the highest logit is wanted, and where it is: others may be given as -infinity.
    best_only: bool = False


def prompt_batch(token_ids: Sequence[int], groups: int, page_size: int) -> Batch:
    """One sequence from an empty cache, in the first pages, every row's logits wanted."""
    count = len(token_ids)
    pages = np.arange(-(-count // page_size), dtype=np.int32)
    return Batch(
        token_ids=np.asarray(token_ids, np.int32),
        cu_seqlens=np.array([0, count], np.int32),
        past_lens=np.zeros(1, np.int32),
        block_table=np.tile(pages, (groups, 1, 1)),
        slot_mapping=np.tile(np.arange(count, dtype=np.int32), (groups, 1)),
        logit_rows=np.arange(count, dtype=np.int32),
    )
