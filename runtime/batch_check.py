"""The executor contract, checked: arrays that break it are refused before anything is touched."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from ..errors import ExecutorError
from .batch import Batch

DIMENSIONS = {
    "token_ids": 1,
    "cu_seqlens": 1,
    "past_lens": 1,
    "block_table": 3,
    "slot_mapping": 2,
    "logit_rows": 1,
}


def check_batch(batch: Batch, *, groups: int, vocab_size: int, num_blocks: int, page_size: int) -> None:
    """Raises `ExecutorError`, naming the array and what is wrong with it, unless `batch` keeps the contract
    for a model of `groups` window groups and a cache of `num_blocks` pages."""
    check_kinds(batch)
    tokens, sequences = len(batch.token_ids), len(batch.past_lens)
    _shape("cu_seqlens", batch.cu_seqlens.shape, (sequences + 1,))
    _shape("block_table", batch.block_table.shape[:2], (groups, sequences))
    _shape("slot_mapping", batch.slot_mapping.shape, (groups, tokens))

    lengths = _lengths(batch)
    _range("token_ids", batch.token_ids, 0, vocab_size)
    _range("past_lens", batch.past_lens, 0, 1 << 30)
    _range("block_table", batch.block_table, -1, num_blocks)
    _range("slot_mapping", batch.slot_mapping, -1, num_blocks * page_size)
    _range("logit_rows", batch.logit_rows, 0, tokens)

    room = batch.block_table.shape[2] * page_size
    needed = batch.past_lens.astype(np.int64) + lengths
    if sequences and needed.max() > room:
        raise ExecutorError(
            f"block_table has room for {room} tokens; sequence {needed.argmax()} comes to {needed.max()}"
        )
    check_slots(batch, page_size)


def check_kinds(batch: Batch, names: Iterable[str] = tuple(DIMENSIONS)) -> None:
    """The part that says whether arrays are int32 and of the right number of dimensions."""
    for name in names:
        array: Any = getattr(batch, name)
        if not isinstance(array, np.ndarray) or array.dtype != np.int32 or array.ndim != DIMENSIONS[name]:
            found = (
                f"{array.dtype} {list(array.shape)}"
                if isinstance(array, np.ndarray)
                else type(array).__name__
            )
            raise ExecutorError(f"{name} is {found}; expected int32 with {DIMENSIONS[name]} dimensions")


def check_slots(batch: Batch, page_size: int) -> None:
    """The part of `check_batch` that compares a step's tokens with each other. Raises `ExecutorError` where a
    group's slot is written twice, or a page by two sequences; or where the arrays that say so have no sound
    shape."""
    tokens = len(batch.token_ids)
    if tokens < 2:
        return
    check_kinds(batch, ("token_ids", "cu_seqlens", "slot_mapping"))
    _shape("slot_mapping", batch.slot_mapping.shape, (len(batch.slot_mapping), tokens))
    sequence_of = np.repeat(np.arange(len(batch.cu_seqlens) - 1), _lengths(batch))
    for group, slots in enumerate(batch.slot_mapping):
        # In order of slots, two that collide in a page have neighbours in it that do.
        order = np.argsort(slots)
        written, sequences = slots[order], sequence_of[order]
        pages = written // page_size
        together = (pages[1:] == pages[:-1]) & (written[1:] >= 0)
        twice = together & (written[1:] == written[:-1])
        if twice.any():
            slot = written[1:][twice][0]
            raise ExecutorError(f"slot_mapping writes slot {slot} of group {group} twice")
        shared = together & (sequences[1:] != sequences[:-1])
        if shared.any():
            at = shared.argmax()
            one, other = sorted(sequences[at : at + 2].tolist())
            raise ExecutorError(
                f"slot_mapping writes page {pages[at]} of group {group} for sequences {one} and {other}"
            )


def check_group(group: int, groups: int) -> None:
    """Raises `ExecutorError` unless `group` is one of a model's window groups."""
    if not isinstance(group, int) or not 0 <= group < groups:
        raise ExecutorError(f"group is {group!r}; expected 0 to {groups - 1}")


def _lengths(batch: Batch) -> "np.ndarray[Any, np.dtype[np.int32]]":
    """New tokens of each sequence, [B]."""
    bounds, tokens = batch.cu_seqlens, len(batch.token_ids)
    if not len(bounds):
        raise ExecutorError("cu_seqlens has shape [0]; expected one more than there are sequences")
    if bounds[0] != 0 or bounds[-1] != tokens or (bounds[1:] < bounds[:-1]).any():
        raise ExecutorError(
            f"cu_seqlens goes from {bounds[0]} to {bounds[-1]}; expected 0 to {tokens}, never falling"
        )
    return np.diff(bounds)


def _shape(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise ExecutorError(f"{name} has shape {list(found)}; expected {list(expected)}")


def _range(name: str, array: "np.ndarray[Any, np.dtype[np.int32]]", low: int, end: int) -> None:
    """Every entry is at least `low` and less than `end`."""
    if array.size and (array.min() < low or array.max() >= end):
        bad = array.min() if array.min() < low else array.max()
        raise ExecutorError(f"{name} holds {bad}; expected {low} to {end - 1}")
