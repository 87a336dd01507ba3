"""Damage for files of every kind, and what reading one may cost."""

import contextlib
import json
import os
import resource
import signal
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nybble.errors import NybbleError

SECONDS = 1.0  # of this process, whatever others do
MEMORY_BYTES = 256 << 20  # more than there was before
CASES = pytest.mark.parametrize("cases", [500, pytest.param(10_000, marks=pytest.mark.slow)])

INTEGERS = (
    0, 1, 2, 3, 15, 16, 31, 64, 255, 1 << 15, 1 << 20, (1 << 31) - 1, 1 << 31, 1 << 32, (1 << 63) - 1,
    1 << 63, (1 << 64) - 1,
)  # fmt: skip
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, -1, 1.5, 1e308, 1 << 70, *INTEGERS, "", "x", "../x", "F16", "F32", "BF16", "I8", "I32",
    "U8", "F64", "nf4", "\0", "é" * 300, [], {}, [0], [1, 2, 3], [1 << 40, 1 << 40], [[]], {"x": 1},
    [None], ["x"],
)  # fmt: skip


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """An error in what takes more than `SECONDS` of processor time, or allocates `MEMORY_BYTES` more than
    this process has."""

    def late(*_: object) -> None:
        raise TimeoutError(f"more than {SECONDS} s of processor time")

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    before = signal.signal(signal.SIGPROF, late)
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES, hard))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def check(cases: int, damaged: Callable[[st.DataObject], Callable[[], object]]) -> None:
    """Draws `cases` damaged inputs and reads each: it is read, or refused with one line. What `damaged` gives
    reads one."""

    @settings(max_examples=cases, deadline=None, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def read_each(data: st.DataObject) -> None:
        read = damaged(data)
        try:
            with limits():
                read()
        except NybbleError as error:
            if "\n" in str(error):
                pytest.fail(f"more than a line: {error}")

    read_each()


def changed_bytes(data: st.DataObject, content: bytes, header: int) -> bytes:
    """Some bytes or whole numbers are others, most of them among the first `header`; or bytes are more or
    fewer."""
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, header - 1) | st.integers(0, len(content) - 1))
        kind = data.draw(st.sampled_from(["byte", "byte", "number", "number", "more", "fewer"]))
        if kind == "byte":
            changed[at : at + 1] = bytes([data.draw(st.integers(0, 255))])
        elif kind == "number":
            width, form = data.draw(st.sampled_from([(4, "<I"), (8, "<Q")]))
            number = data.draw(st.sampled_from(INTEGERS))
            changed[at : at + width] = struct.pack(form, number % (1 << 8 * width))
        elif kind == "more":
            changed[at:at] = data.draw(st.binary(min_size=1, max_size=9))
        else:
            del changed[at : at + data.draw(st.integers(1, 9))]
    if data.draw(st.integers(0, 3)) == 0:
        del changed[data.draw(st.integers(0, len(changed))) :]
    return bytes(changed)


def changed_json(data: st.DataObject, value: Any) -> Any:
    """A copy in which one to three places hold something else, or are gone, or are there twice under another
    name."""
    value = json.loads(json.dumps(value))
    for _ in range(data.draw(st.integers(1, 3))):
        place = value
        while isinstance(place, dict | list) and place:
            keys = sorted(place) if isinstance(place, dict) else range(len(place))
            key = data.draw(st.sampled_from(keys))
            child = place[key]  # type: ignore[index]
            if not isinstance(child, dict | list) or not child or data.draw(st.integers(0, 3)) == 0:
                break
            place = child
        else:
            continue
        action = data.draw(st.sampled_from(["other", "other", "other", "gone", "twice", "sibling"]))
        if action == "gone":
            del place[key]  # type: ignore[arg-type]
        elif action == "twice" and isinstance(place, dict):
            place[f"{key}{data.draw(st.sampled_from(['', '2', '.weight', '_']))}"] = child
        elif action == "sibling":
            place[key] = place[data.draw(st.sampled_from(keys))]  # type: ignore[index]
        elif isinstance(child, int) and not isinstance(child, bool) and data.draw(st.booleans()):
            place[key] = child + data.draw(st.sampled_from([-64, -8, -1, 1, 8, 64]))  # type: ignore[index]
        else:
            odd = data.draw(st.sampled_from(ODD_VALUES))
            place[key] = json.loads(json.dumps(odd))  # type: ignore[index]
    return value


def changed_safetensors(data: st.DataObject, content: bytes) -> bytes:
    """Bytes that are others, or a header that says something else."""
    end = 8 + int.from_bytes(content[:8], "little")
    if data.draw(st.booleans()):
        return changed_bytes(data, content, end)
    header = json.dumps(changed_json(data, json.loads(content[8:end]))).encode()
    return len(header).to_bytes(8, "little") + header + content[end:]
