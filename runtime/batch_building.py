"""From a step's chunks to the executor's input."""

from collections.abc import Sequence as Listed

import numpy as np

from ..kvcache import block_table
from .batch import Batch
from .sequence import Sequence
from .sequence_state import Chunk


def build_batch(chunks: Listed[Chunk[Sequence]]) -> Batch:
    """The executor's input for these chunks, whose pages are allocated."""
    # Few calls of numpy: after a step the caches are empty of it, and each takes microseconds.
    tokens: list[int] = []
    begins, past, rows = [0], [], []
    slots: list[list[int]] = [[] for _ in range(chunks[0].sequence.blocks.num_groups)]
    for chunk in chunks:
        sequence, begin = chunk.sequence, begins[-1]
        rows += [begin + row for row in logit_rows(chunk)]
        tokens += chunk.tokens
        begins.append(begin + chunk.count)
        past.append(sequence.computed)
        for of_group, more in zip(slots, sequence.blocks.slots(sequence.computed, chunk.count), strict=True):
            of_group += more
    return Batch(
        token_ids=np.array(tokens, np.int32),
        cu_seqlens=np.array(begins, np.int32),
        past_lens=np.array(past, np.int32),
        block_table=block_table([chunk.sequence.blocks for chunk in chunks]),
        slot_mapping=np.array(slots, np.int32),
        logit_rows=np.array(rows, np.int32),
        best_only=all(chunk.sequence.best_only for chunk in chunks),
    )


def logit_rows(chunk: Chunk[Sequence]) -> range:
    """The chunk's rows whose logits are needed: for an answer the last of all tokens and those of a draft
    after it; for a score every one that has a next token."""
    count = chunk.count
    if chunk.sequence.request.score:
        return range(count - chunk.completes)
    return range(count - 1 - len(chunk.draft), count) if chunk.completes else range(0)
