"""How `OrtExecutor` cuts one step into runs of the graph.

The graph pads every sequence's queries to the longest of the run, so sequences of unlike lengths run apart: a
decode beside a chunk of 512 would cost as much as the chunk. It gathers keys and values of as many tokens for
each as the longest context has, so contexts run apart, too, where that saves more than another run costs.
And the scores of a run are held at once, so long chunks run in pieces.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ..records import dataclass
from .batch import Batch

MAX_RUN_TOKENS = 512  # of a run, padded


@dataclass(frozen=True)
class Piece:
    """New tokens [start, stop) of one sequence, counted from its first new one."""

    sequence: int
    start: int
    stop: int
    context: int  # tokens before `stop`, those in the cache included

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, eq=False)
class Run:
    """A batch for the graph, and which of the step's logits it gives."""

    batch: Batch
    logits: NDArray[np.intp]  # indices into the step's logit_rows, one for each of the batch's


def split_step(
    batch: Batch, page_size: int, max_tokens: int = MAX_RUN_TOKENS, *, run_cost: int
) -> Iterator[Run]:
    """The runs of a step in order: a sequence's pieces keep theirs. A run's sequences differ in length by
    less than half and have at most `max_tokens` tokens, padding included; its block table is as wide as its
    longest sequence needs. `run_cost` is what one more run costs, in tokens whose keys and values could be
    gathered in that time."""
    lengths, past = np.diff(batch.cu_seqlens).tolist(), batch.past_lens.tolist()
    for turn in range(-(-max(lengths, default=0) // max_tokens)):
        pieces = []
        for sequence, length in enumerate(lengths):
            start, stop = turn * max_tokens, min((turn + 1) * max_tokens, length)
            if start < stop:
                pieces.append(Piece(sequence, start, stop, past[sequence] + stop))
        for group in _group(pieces, max_tokens):
            for alike in _by_context(group, run_cost):
                yield _run(batch, alike, page_size)


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


def _by_context(pieces: list[Piece], run_cost: int) -> Iterator[list[Piece]]:
    """Longest context first; cut where that saves most, as long as it is more than a run costs."""
    pieces = sorted(pieces, key=lambda p: -p.context)
    longest = pieces[0].context
    saved = [(len(pieces) - i) * (longest - piece.context) for i, piece in enumerate(pieces)]
    if max(saved) <= run_cost:
        yield pieces
        return
    cut = saved.index(max(saved))
    yield from _by_context(pieces[:cut], run_cost)
    yield from _by_context(pieces[cut:], run_cost)


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
