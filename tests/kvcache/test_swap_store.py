"""Pieces of bytes in a file without a name: what was put comes back, and a full disk keeps nothing."""

import os
import resource
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nybble.kvcache import FileStore


@given(data=st.data())
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_pieces_come_back_whatever_was_dropped_between(tmp_path: Path, data: st.DataObject) -> None:
    store, kept = FileStore(tmp_path), {}
    for number in range(data.draw(st.integers(1, 20))):
        if kept and data.draw(st.booleans()):
            key = data.draw(st.sampled_from(sorted(kept)))
            store.drop(key)
            del kept[key]
        page_bytes, pages = data.draw(st.sampled_from([3, 8])), data.draw(st.integers(0, 3))
        piece = bytes([number]) * (page_bytes * pages)
        key = store.put(piece, page_bytes)
        if pages:
            kept[key] = piece
    for key, piece in kept.items():
        assert store.get(key) == piece
    assert os.listdir(tmp_path) == []
    store.close()
    store.close()


def test_the_places_of_dropped_pages_are_used_again(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    for _ in range(50):
        keys = [store.put(bytes(40), 8), store.put(bytes(9), 3)]
        for key in keys:
            store.drop(key)
    assert os.fstat(store._descriptor).st_size == 49


def test_nothing_is_made_before_it_is_needed_and_a_folder_that_is_not_there_is_an_error(
    tmp_path: Path,
) -> None:
    store = FileStore(tmp_path / "not there")
    store.close()
    with pytest.raises(OSError, match="not there"):
        store.put(bytes(8), 8)


def test_a_full_disk_keeps_nothing_and_later_pages_find_room(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    key = store.put(b"12345678", 8)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            store.put(bytes(24), 8)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert store.get(key) == b"12345678"
    assert store.get(store.put(b"abcdefghABCDEFGH", 8)) == b"abcdefghABCDEFGH"
    assert os.fstat(store._descriptor).st_size <= 32


def test_a_file_that_was_cut_is_an_error(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    key = store.put(bytes(16), 8)
    os.ftruncate(store._descriptor, 12)
    with pytest.raises(OSError, match="ends at byte 12"):
        store.get(key)


def test_how_long_a_transfer_takes_is_learned(tmp_path: Path) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 0.5
        return now[0]

    store = FileStore(tmp_path, clock=clock)
    first = store.seconds(1000)
    for _ in range(100):
        store.drop(store.put(bytes(1000), 1000))
    assert first < store.seconds(1000) == pytest.approx(2 * 0.5, rel=0.01)
