"""Decode steps with streamed weights, and what bounds them: for `streaming.py` and its child."""

import ctypes
import mmap
import os
import platform
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from nybble.devices.residency import ResidencyPlan
from nybble.models.spec import ModelSpec
from nybble.runtime.batch import Batch
from nybble.runtime.cpu_executor import PAGE_SIZE, CpuExecutor
from nybble.runtime.packed_cache import open_packed
from nybble.runtime.packed_file import MappedWeights
from nybble.runtime.streaming import streamed_bytes

CONTEXT = 64  # tokens before each step; the cache's zeros take as long as any
PIECE, DEPTH = 512 << 10, 16  # bytes of a plain read, and how many are under way: the stream's

# Of the calls io_setup, io_destroy, io_getevents and io_submit.
_NUMBERS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long


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
    """Bytes a second at which a plain loop reads what the plan streams, past the page cache, with nothing
    else to do: as many reads under way as the stream has, into huge pages, as the stream reads."""
    descriptor = os.open(source.file.path, os.O_RDONLY | os.O_DIRECT)
    pieces = [piece for _ in range(passes) for piece in _pieces(source, residency)]
    # Holds a huge page wherever it begins; shared memory would have none.
    memory = mmap.mmap(-1, DEPTH * PIECE + (2 << 20), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    reads = AsynchronousReads(descriptor, address + -address % (2 << 20))
    start = time.perf_counter()
    total, free = 0, list(range(DEPTH))
    for at, size in pieces:
        while not free:
            for slot, count in reads.ended():
                free.append(slot)
                total += count
        reads.begin(free.pop(), at, size)
    while len(free) < DEPTH:
        for slot, count in reads.ended():
            free.append(slot)
            total += count
    seconds = time.perf_counter() - start
    reads.close()
    os.close(descriptor)
    return total / seconds


class AsynchronousReads:
    """Linux's asynchronous reads (man 2 io_submit) into `DEPTH` places of `PIECE` bytes from an address."""

    def __init__(self, descriptor: int, address: int) -> None:
        self._descriptor, self._address = descriptor, address
        self._setup, self._destroy, self._getevents, self._submit = _NUMBERS[platform.machine()]
        self._context = ctypes.c_ulong()
        self._call(self._setup, ctypes.c_long(DEPTH), ctypes.byref(self._context))
        self._events = (ctypes.c_int64 * (4 * DEPTH))()

    def begin(self, slot: int, at: int, size: int) -> None:
        address = self._address + slot * PIECE
        block = struct.pack("<QIiHhIQQqQII", slot, 0, 0, 0, 0, self._descriptor, address, size, at, 0, 0, 0)
        data = ctypes.create_string_buffer(block, 64)
        pointer = ctypes.c_void_p(ctypes.addressof(data))
        self._call(self._submit, self._context, ctypes.c_long(1), ctypes.byref(pointer))

    def ended(self) -> list[tuple[int, int]]:
        """Waits for a read to end; places and bytes."""
        counts = ctypes.c_long(1), ctypes.c_long(DEPTH)
        found = self._call(self._getevents, self._context, *counts, self._events, None)
        return [(self._events[4 * i], self._events[4 * i + 2]) for i in range(found)]

    def close(self) -> None:
        self._call(self._destroy, self._context)

    @staticmethod
    def _call(number: int, *arguments: Any) -> int:
        found = _LIBC.syscall(ctypes.c_long(number), *arguments)
        if found < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return int(found)


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
