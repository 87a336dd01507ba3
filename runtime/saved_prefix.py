"""Prefixes that outlive the process: from the cache to a file, and back."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ..errors import RequestError, SettingError
from ..kvcache import KvCache, SequenceBlocks
from .executor import NUMERICS_VERSION, Executor
from .prefix_file import PrefixFile, PrefixKey, write_prefix

PIECE_BYTES = 16 << 20  # read or written at once


def prefix_key(executor: Executor, digest: str) -> PrefixKey:
    """What a prefix of this executor's cache is saved for; `digest` is the artifact's."""
    spec, layout = executor.spec, executor.kv_layout
    return PrefixKey(
        artifact=digest,
        page_format=layout.page_format,
        kv_dtype=layout.kv_dtype,
        page_size=layout.page_size,
        windows=spec.window_groups or (None,),
        group_bytes=layout.group_bytes,
        rope=repr(spec.ropes),
        numerics=NUMERICS_VERSION,
    )


def save_prefix(file: Path, digest: str, executor: Executor, cache: KvCache, tokens: Sequence[int]) -> int:
    """Writes what the prefix tree has of `tokens`, in full pages, and returns how many tokens that is. Raises
    `RequestError` when it is none, and `OutputError`."""
    key = prefix_key(executor, digest)
    blocks = cache.sequence()
    try:
        count = cache.share(blocks, tokens)
        if count == 0:
            raise RequestError(
                f"none of the prefix's {len(tokens)} tokens are in the prefix tree; expected a prefix that "
                f"has run, of at least one page of {cache.page_size} tokens"
            )
        pages = [_read(executor, blocks, group, size) for group, size in enumerate(key.group_bytes)]
        write_prefix(file, key, tokens[:count], pages)
    finally:
        blocks.release()
    return count


def load_prefix(file: Path, digest: str, executor: Executor, cache: KvCache) -> tuple[int, ...]:
    """Puts a saved prefix into the prefix tree, where it stays pinned, and returns its tokens. Pages that the
    tree has already are kept. All or nothing: raises `ModelFormatError` for a file that is damaged or of
    another model, `OutOfPagesError` where the cache has no room, `SettingError` where prefixes are not
    shared. All pending copies must have been made."""
    if not cache.shares_prefixes:
        raise SettingError("a prefix cannot be loaded: sharing of prefixes is switched off")
    if cache.has_copies:
        raise ValueError("pages are still to be copied: take_copies comes before they are written")
    key = prefix_key(executor, digest)
    blocks = cache.sequence()
    with PrefixFile(file, key) as saved:
        tokens = saved.tokens
        if max(tokens) >= executor.spec.vocab_size:
            raise RequestError(f"{file}: holds token {max(tokens)}; the model has {executor.spec.vocab_size}")
        try:
            shared = cache.share(blocks, tokens)
            blocks.append(len(tokens) - shared)
            blocks.release_window(len(tokens))
            for group, (table, size) in enumerate(zip(blocks.tables, key.group_bytes, strict=True)):
                begin = max(saved.first_pages[group], shared // key.page_size)
                for at, stop in _pieces(begin, saved.num_pages, size):
                    ids = np.array(table[at:stop], np.int32)
                    executor.write_blocks(ids, saved.pages(group, at, stop), group)
            cache.insert(blocks, tokens, len(tokens))
            cache.pin(tokens)
        finally:
            blocks.release()
    return tokens


def _read(executor: Executor, blocks: SequenceBlocks, group: int, size: int) -> Iterator[bytes]:
    table = [page for page in blocks.tables[group] if page >= 0]
    for begin, stop in _pieces(0, len(table), size):
        yield executor.read_blocks(np.array(table[begin:stop], np.int32), group)


def _pieces(begin: int, end: int, page_bytes: int) -> Iterator[tuple[int, int]]:
    step = max(1, PIECE_BYTES // page_bytes)
    for at in range(begin, end, step):
        yield at, min(at + step, end)
