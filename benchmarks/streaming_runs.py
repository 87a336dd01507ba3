"""Decode steps with streamed weights, and what bounds them: for `streaming.py` and its child."""

import ctypes
import mmap
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from nybble.devices.residency import ResidencyPlan
from nybble.models.spec import ModelSpec
from nybble.runtime.batch import Batch
from nybble.runtime.cpu_executor import PAGE_SIZE, CpuExecutor
from nybble.runtime.packed_cache import open_packed
from nybble.runtime.packed_file import MappedWeights
from nybble.runtime.streaming import streamed_bytes

CONTEXT = 64  # tokens before each step; the cache's zeros take as long as any
PIECE, READERS = 512 << 10, 2  # bytes of a plain read, and threads that read: the stream's


def open_executor(
    file: Path, spec: ModelSpec, digest: str, residency: ResidencyPlan, threads: int, sequences: int
) -> tuple[MappedWeights, CpuExecutor]:
    """An executor with a cache for so many sequences."""
    source = open_packed(file, spec, digest, residency)
    executor = CpuExecutor.from_packed(source, threads=threads, max_position=1024, residency=residency)
    executor.allocate_kv(sequences * (CONTEXT // PAGE_SIZE + 1), PAGE_SIZE, "f16")
    executor.reserve(sequences, sequences)
    return source, executor


def decode_batch(spec: ModelSpec, sequences: int) -> Batch:
    """A token each of so many sequences."""
    groups, pages = max(1, len(spec.window_groups)), CONTEXT // PAGE_SIZE + 1
    table = np.arange(sequences * pages, dtype=np.int32).reshape(sequences, pages)
    slots = table[:, -1] * PAGE_SIZE
    return Batch(
        token_ids=np.arange(sequences, dtype=np.int32) * 997 % spec.vocab_size,
        cu_seqlens=np.arange(sequences + 1, dtype=np.int32),
        past_lens=np.full(sequences, CONTEXT, np.int32),
        block_table=np.tile(table, (groups, 1, 1)),
        slot_mapping=np.tile(slots, (groups, 1)),
        logit_rows=np.arange(sequences, dtype=np.int32),
    )


def step_seconds(executor: CpuExecutor, sequences: int, steps: int) -> float:
    """Seconds of a decode step, after some that warm up."""
    batch = decode_batch(executor.spec, sequences)
    for _ in range(3):
        executor.step(batch)
    start = time.perf_counter()
    for _ in range(steps):
        executor.step(batch)
    return (time.perf_counter() - start) / steps


def read_rate(source: MappedWeights, residency: ResidencyPlan, passes: int) -> float:
    """Bytes a second at which plain loops read what the plan streams, past the page cache: two threads into
    huge pages, as the stream reads."""
    descriptor = os.open(source.file.path, os.O_RDONLY | os.O_DIRECT)
    pieces = [piece for _ in range(passes) for piece in _pieces(source, residency)]

    def read(begin: int) -> int:
        # Holds a huge page wherever it begins; shared memory would have none.
        memory = mmap.mmap(-1, 4 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        buffer = memoryview(memory)[-ctypes.addressof(ctypes.c_char.from_buffer(memory)) % (2 << 20) :]
        return sum(os.preadv(descriptor, [buffer[:size]], at) for at, size in pieces[begin::READERS])

    with ThreadPoolExecutor(READERS) as pool:
        start = time.perf_counter()
        total = sum(pool.map(read, range(READERS)))
        seconds = time.perf_counter() - start
    os.close(descriptor)
    return total / seconds


def against_disk(
    source: MappedWeights, executor: CpuExecutor, residency: ResidencyPlan, steps: int, passes: int
) -> tuple[float, float]:
    """Seconds in which the disk gives what a step streams, and of a step of one sequence."""
    # Many disks are fast until an allowance is used up, which comes back while they rest.
    read_rate(source, residency, 2 * passes)
    before = read_rate(source, residency, passes)
    seconds = step_seconds(executor, 1, steps)
    after = read_rate(source, residency, passes)
    return 2 * streamed_bytes(source, residency) / (before + after), seconds


def _pieces(source: MappedWeights, residency: ResidencyPlan) -> Iterator[tuple[int, int]]:
    sections = [source.file.layer(layer) for layer in residency.streamed_layers]
    sections += [source.file.ends] if residency.streamed_head else []
    for section in sections:
        end = section.offset + section.size
        yield from ((at, min(PIECE, end - at)) for at in range(section.offset, end, PIECE))
