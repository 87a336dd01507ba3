"""Where the bytes of swapped pages wait: host memory, or a file."""

import os
import time
import weakref
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, Protocol

# Bytes a second that a file is taken to be written or read at, until that was seen; an SD card has this much.
FIRST_RATE = 20e6
# What the last transfer weighs in the rate.
WEIGHT = 0.25


class SwapStore(Protocol):
    """Keeps pieces of bytes. `page_bytes` divides the length of a piece."""

    def put(self, data: bytes, page_bytes: int) -> Hashable:
        """Keeps `data`; returns the key it is found by. Raises `OSError`, and nothing is kept then."""
        ...

    def get(self, key: Any) -> bytes:
        """What was kept. Raises `OSError`."""
        ...

    def drop(self, key: Any) -> None:
        """Forgets it."""
        ...


class HostStore:
    """A `SwapStore` in this process's memory."""

    def __init__(self) -> None:
        self._pieces: dict[int, bytes] = {}
        self._next = 0

    def put(self, data: bytes, page_bytes: int) -> int:
        self._next += 1
        self._pieces[self._next] = data
        return self._next

    def get(self, key: int) -> bytes:
        return self._pieces[key]

    def drop(self, key: int) -> None:
        del self._pieces[key]


class FileStore:
    """A `SwapStore` in a file without a name in `folder`, made when it is first written to: it is gone with
    this process, however that ends. A page's place is used again by the next page of the same size."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.perf_counter) -> None:
        self.folder = folder
        self._clock = clock
        self._descriptor = -1
        self._closing: weakref.finalize[..., FileStore] | None = None
        self._end = 0
        self._free: dict[int, list[int]] = {}  # offsets, by bytes of a page
        self._rate = FIRST_RATE

    def seconds(self, nbytes: int) -> float:
        """How long it takes to write so many bytes and read them back, from what was seen so far."""
        return 2 * nbytes / self._rate

    def put(self, data: bytes, page_bytes: int) -> tuple[int, ...]:
        if self._descriptor < 0:
            self._open()
        free = self._free.setdefault(page_bytes, [])
        places = tuple(self._place(free, page_bytes) for _ in range(len(data) // page_bytes))
        started = self._clock()
        try:
            for index, offset in enumerate(places):
                self._write(memoryview(data)[index * page_bytes : (index + 1) * page_bytes], offset)
        except BaseException:
            free += places
            raise
        self._observe(len(data), started)
        return (page_bytes, *places)

    def get(self, key: tuple[int, ...]) -> bytes:
        page_bytes, *places = key
        data = bytearray(page_bytes * len(places))
        started = self._clock()
        for index, offset in enumerate(places):
            self._read(memoryview(data)[index * page_bytes : (index + 1) * page_bytes], offset)
        self._observe(len(data), started)
        return bytes(data)

    def drop(self, key: tuple[int, ...]) -> None:
        page_bytes, *places = key
        self._free[page_bytes] += places

    def close(self) -> None:
        """Gives the disk's space back. May be called again."""
        if self._closing is not None:
            self._closing()
        self._descriptor, self._end, self._free = -1, 0, {}

    def _open(self) -> None:
        import tempfile  # brings in much that running does not need

        self._descriptor, path = tempfile.mkstemp(prefix="nybble-swap-", dir=self.folder)
        self._closing = weakref.finalize(self, os.close, self._descriptor)
        os.unlink(path)

    def _place(self, free: list[int], page_bytes: int) -> int:
        if free:
            return free.pop()
        self._end += page_bytes
        return self._end - page_bytes

    def _write(self, data: memoryview, offset: int) -> None:
        while data:
            count = os.pwrite(self._descriptor, data, offset)
            data, offset = data[count:], offset + count

    def _read(self, buffer: memoryview, offset: int) -> None:
        while buffer:
            count = os.preadv(self._descriptor, [buffer], offset)
            if not count:
                raise OSError(0, f"the swap file ends at byte {offset}")
            buffer, offset = buffer[count:], offset + count

    def _observe(self, nbytes: int, started: float) -> None:
        """So many bytes were written or read since then."""
        rate = nbytes / max(self._clock() - started, 1e-9)
        self._rate += WEIGHT * (rate - self._rate)
