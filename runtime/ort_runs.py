"""How `OrtExecutor` cuts one step into runs of the graph.

The graph pads every sequence's queries to the longest of the run, so sequences of unlike lengths run apart: a
decode beside a chunk of 512 would cost as much as the chunk. And the scores of a run are held at once, so
long chunks run in pieces.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .batch import Batch

MAX_RUN_TOKENS = 512  # of a run, padded


@dataclass(frozen=True)
class Piece:
    """New tokens [start, stop) of one sequence, counted from its first new one."""

    sequence: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, eq=False)
class Run:
    """A batch for the graph, and which of the step's logits it gives."""

    batch: Batch
    logits: NDArray[np.intp]  # indices into the step's logit_rows, one for each of the batch's


def split_step(batch: Batch, page_size: int, max_tokens: int = MAX_RUN_TOKENS) -> Iterator[Run]:
    """The runs of a step in order: a sequence's pieces keep theirs. A run's sequences differ in length by
    less than half and have at most `max_tokens` tokens, padding included; its block table is as wide as its
    longest sequence needs."""
    lengths = np.diff(batch.cu_seqlens).tolist()
    for turn in range(-(-max(lengths, default=0) // max_tokens)):
        pieces = [
            Piece(sequence, turn * max_tokens, min((turn + 1) * max_tokens, length))
            for sequence, length in enumerate(lengths)
            if length > turn * max_tokens
        ]
        for group in _group(pieces, max_tokens):
            yield _run(batch, group, page_size)


def _group(pieces: list[Piece], max_tokens: int) -> Iterator[list[Piece]]:
    """Longest first; a group ends where the next piece is under half its longest or it is full."""
    group: list[Piece] = []
    for piece in sorted(pieces, key=lambda p: -p.length):
        if group:
            longest = group[0].length
            if 2 * piece.length <= longest or (len(group) + 1) * longest > max_tokens:
                yield group
                group = []
        group.append(piece)
    if group:
        yield group


def _run(batch: Batch, pieces: list[Piece], page_size: int) -> Run:
    sequences = np.array([piece.sequence for piece in pieces])
    starts = np.array([piece.start for piece in pieces])
    lengths = np.array([piece.length for piece in pieces])
    begins = batch.cu_seqlens[sequences] + starts
    rows = np.concatenate([np.arange(b, b + n) for b, n in zip(begins, lengths, strict=True)])
    past = batch.past_lens[sequences] + starts
    width = -(-int((past + lengths).max()) // page_size)
    place = np.full(len(batch.token_ids), -1, np.int32)
    place[rows] = np.arange(len(rows), dtype=np.int32)
    wanted = place[batch.logit_rows]
    logits = np.flatnonzero(wanted >= 0)
    part = Batch(
        token_ids=batch.token_ids[rows],
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        past_lens=past.astype(np.int32),
        block_table=np.ascontiguousarray(batch.block_table[:, sequences, :width]),
        slot_mapping=np.ascontiguousarray(batch.slot_mapping[:, rows]),
        logit_rows=wanted[logits],
    )
    return Run(part, logits)
