"""Preempted sequences' pages in host memory or a file: they come back as they were, or not at all."""

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from nybble.kvcache import (
    FileStore,
    HostStore,
    KvCache,
    OutOfPagesError,
    SequenceBlocks,
    SwapSpace,
    SwapStore,
    swap,
)

SIZE, PAGE_BYTES = 2, (4, 8)


class Memory:
    """Two groups' pages; a page holds the numbers of its sequence and page."""

    def __init__(self, num_blocks: int) -> None:
        self.pages = [np.zeros((num_blocks, size), np.uint8) for size in PAGE_BYTES]
        self.written = 0

    def read_blocks(self, ids: NDArray[np.int32], group: int = 0) -> bytes:
        return self.pages[group][ids].tobytes()

    def write_blocks(self, ids: NDArray[np.int32], data: bytes, group: int = 0) -> None:
        assert len(set(ids.tolist())) == len(ids)
        assert ids.min() >= 0
        self.pages[group][ids] = np.frombuffer(data, np.uint8).reshape(len(ids), PAGE_BYTES[group])
        self.written += len(data)

    def fill(self, blocks: SequenceBlocks, number: int) -> None:
        for group, table in enumerate(blocks.tables):
            for index, page in enumerate(table):
                if page >= 0:
                    self.pages[group][page] = 16 * number + index

    def holds(self, blocks: SequenceBlocks, number: int) -> bool:
        return all(
            (self.pages[group][page] == 16 * number + index).all()
            for group, table in enumerate(blocks.tables)
            for index, page in enumerate(table)
            if page >= 0
        )


def make(
    num_blocks: int = 8, limit: int = 1 << 20, store: SwapStore | None = None
) -> tuple[KvCache, SwapSpace, Memory]:
    cache = KvCache(num_blocks, SIZE, (None, 4))
    return cache, SwapSpace(cache, limit, PAGE_BYTES, store), Memory(num_blocks)


@pytest.fixture(autouse=True, params=["pages one by one", "all pages together"])
def run_bytes(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap, "RUN_BYTES", 1 if request.param == "pages one by one" else 1 << 20)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    order=st.randoms(use_true_random=False),
    in_file=st.booleans(),
)
def test_pages_come_back_as_they_were(
    lengths: list[int], order: Any, in_file: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    store = FileStore(tmp_path_factory.getbasetemp()) if in_file else HostStore()
    cache, space, memory = make(store=store)
    tables = []
    for number, length in enumerate(lengths):
        blocks = cache.sequence()
        blocks.append(length)
        memory.fill(blocks, number)
        assert space.swap_out(number, blocks, length, memory)
        blocks.release_window(length)  # those that are not seen any more are not kept
        tables.append([[page >= 0 for page in table] for table in blocks.tables])
        blocks.release()
    assert cache.pages_available == 8
    held = space.used
    numbers = list(range(len(lengths)))
    order.shuffle(numbers)
    for number in numbers:
        blocks = cache.sequence()
        assert space.swap_in(number, blocks, [number] * lengths[number], memory) == lengths[number]
        assert memory.holds(blocks, number)
        assert number not in space
        assert space.used < held
        held = space.used
        assert [[page >= 0 for page in table] for table in blocks.tables] == tables[number]
        blocks.release()
        cache.check()
    assert space.used == len(space) == 0


def test_the_limit_is_kept() -> None:
    cache, space, memory = make(limit=27)
    blocks = cache.sequence()
    blocks.append(5)
    assert not space.has_room(5)
    assert not space.swap_out("a", blocks, 5, memory)
    assert space.used == 0
    assert space.swap_out("a", blocks, 4, memory), "of the pages of computed tokens alone"
    assert space.used == 24
    assert not space.swap_out("b", blocks, 1, memory)
    space.discard("a")
    space.discard("a")
    assert space.used == 0
    assert space.swap_out("b", blocks, 1, memory)


def test_what_the_tree_still_has_is_shared_and_not_written() -> None:
    cache, space, memory = make()
    tokens = list(range(8))
    blocks = cache.sequence()
    blocks.append(8)
    cache.insert(blocks, tokens, 7)
    memory.fill(blocks, 1)
    table = blocks.tables
    assert space.swap_out("a", blocks, 7, memory)
    blocks.release()
    assert space.swap_in("a", blocks, tokens, memory) == 7
    assert memory.written == sum(PAGE_BYTES)
    assert blocks.tables[0][:3] == table[0][:3]
    assert blocks.tables[1][2] == table[1][2]
    assert memory.holds(blocks, 1)
    cache.check()


def test_too_few_pages_leave_all_as_it_was() -> None:
    cache, space, memory = make(num_blocks=4)
    blocks = cache.sequence()
    blocks.append(6)
    memory.fill(blocks, 1)
    assert space.swap_out("a", blocks, 6, memory)
    blocks.release()
    other = cache.sequence()
    other.append(4)
    with pytest.raises(OutOfPagesError, match="3 KV pages are needed; 2 of 4 are free"):
        space.swap_in("a", blocks, [1] * 6, memory)
    assert blocks.num_tokens == 0
    assert "a" in space
    other.release()
    assert space.swap_in("a", blocks, [1] * 6, memory) == 6
    assert memory.holds(blocks, 1)


def test_a_failing_write_leaves_all_as_it_was() -> None:
    cache, space, memory = make()
    blocks = cache.sequence()
    blocks.append(6)
    assert space.swap_out("a", blocks, 6, memory)
    blocks.release()

    class Broken:
        def write_blocks(self, ids: NDArray[np.int32], data: bytes, group: int = 0) -> None:
            raise RuntimeError("the device is gone")

    with pytest.raises(RuntimeError, match="device"):
        space.swap_in("a", blocks, [1] * 6, Broken())
    assert cache.pages_available == 8
    assert "a" in space
    cache.check()


def test_copies_come_first() -> None:
    cache, space, memory = make()
    blocks = cache.sequence()
    blocks.append(1)
    other = blocks.fork()
    other.append(1)
    with pytest.raises(ValueError, match="take_copies comes before"):
        space.swap_out("a", other, 1, memory)
    cache.take_copies()
    assert space.swap_out("a", other, 1, memory)


def test_mistakes_are_named() -> None:
    cache, space, memory = make()
    blocks = cache.sequence()
    blocks.append(2)
    assert space.swap_out("a", blocks, 2, memory)
    with pytest.raises(ValueError, match="'a' is swapped out already"):
        space.swap_out("a", blocks, 2, memory)
    with pytest.raises(ValueError, match="3 tokens cannot be computed: 2 have pages"):
        space.swap_out("b", blocks, 3, memory)
    seen = cache.sequence()
    seen.append(6)
    seen.release_window(6)
    with pytest.raises(ValueError, match="pages that token 4 of sequence 'b' sees have left a window"):
        space.swap_out("b", seen, 4, memory)
    with pytest.raises(KeyError):
        space.swap_in("b", cache.sequence(), [1], memory)
    with pytest.raises(ValueError, match="limit is -1"):
        SwapSpace(cache, -1, PAGE_BYTES)
    with pytest.raises(ValueError, match=r"page_bytes is \[4\]; expected bytes of 2 groups"):
        SwapSpace(cache, 1, [4])
    with pytest.raises(ValueError, match="1 pages of group 0 have 4 bytes; expected 5 each"):
        SwapSpace(cache, 99, [5, 8]).swap_out("a", blocks, 2, memory)
