"""The executor contract, checked: arrays that break it are refused before anything is touched."""

from typing import Any

import numpy as np

from ..errors import ExecutorError
from .batch import Batch


def check_batch(batch: Batch, *, groups: int, vocab_size: int, num_blocks: int, page_size: int) -> None:
    """Raises `ExecutorError`, naming the array and what is wrong with it, unless `batch` keeps the contract
    for a model of `groups` window groups and a cache of `num_blocks` pages."""
    for name, dimensions in _DIMENSIONS.items():
        array: Any = getattr(batch, name)
        if not isinstance(array, np.ndarray) or array.dtype != np.int32 or array.ndim != dimensions:
            found = (
                f"{array.dtype} {list(array.shape)}"
                if isinstance(array, np.ndarray)
                else type(array).__name__
            )
            raise ExecutorError(f"{name} is {found}; expected int32 with {dimensions} dimensions")
    tokens, sequences = len(batch.token_ids), len(batch.past_lens)
    _shape("cu_seqlens", batch.cu_seqlens.shape, (sequences + 1,))
    _shape("block_table", batch.block_table.shape[:2], (groups, sequences))
    _shape("slot_mapping", batch.slot_mapping.shape, (groups, tokens))

    bounds = batch.cu_seqlens
    if bounds[0] != 0 or bounds[-1] != tokens or (np.diff(bounds) < 0).any():
        raise ExecutorError(
            f"cu_seqlens goes from {bounds[0]} to {bounds[-1]}; expected 0 to {tokens}, never falling"
        )
    _range("token_ids", batch.token_ids, 0, vocab_size)
    _range("past_lens", batch.past_lens, 0, 1 << 30)
    _range("block_table", batch.block_table, -1, num_blocks)
    _range("slot_mapping", batch.slot_mapping, -1, num_blocks * page_size)
    _range("logit_rows", batch.logit_rows, 0, tokens)

    room = batch.block_table.shape[2] * page_size
    needed = batch.past_lens.astype(np.int64) + np.diff(bounds)
    if sequences and needed.max() > room:
        raise ExecutorError(
            f"block_table has room for {room} tokens; sequence {needed.argmax()} comes to {needed.max()}"
        )
    for group, slots in enumerate(batch.slot_mapping):
        written = np.sort(slots[slots >= 0])
        twice = written[1:][written[1:] == written[:-1]]
        if twice.size:
            raise ExecutorError(f"slot_mapping writes slot {twice[0]} of group {group} twice")


_DIMENSIONS = {
    "token_ids": 1,
    "cu_seqlens": 1,
    "past_lens": 1,
    "block_table": 3,
    "slot_mapping": 2,
    "logit_rows": 1,
}


def _shape(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise ExecutorError(f"{name} has shape {list(found)}; expected {list(expected)}")


def _range(name: str, array: "np.ndarray[Any, np.dtype[np.int32]]", low: int, end: int) -> None:
    """Every entry is at least `low` and less than `end`."""
    if array.size and (array.min() < low or array.max() >= end):
        bad = array.min() if array.min() < low else array.max()
        raise ExecutorError(f"{name} holds {bad}; expected {low} to {end - 1}")
