"""Pages of `OrtExecutor` moved about."""

from dataclasses import replace

import numpy as np
from ort_steps import BLOCKS, IDS, PAGE, int32, make_batch, read_all

from nybble.runtime.ort_executor import OrtExecutor


def test_f16_pages_are_half_the_size_and_nearly_as_good(executor: OrtExecutor) -> None:
    expected, size = executor.step(make_batch([(0, IDS)])), executor.kv_layout.bytes_per_block
    executor.allocate_kv(BLOCKS, PAGE, "f16")
    assert executor.kv_layout.bytes_per_block == size // 2 == 2 * 2 * PAGE * 2 * 16 * 2
    found = executor.step(make_batch([(0, IDS)]))
    assert 0 < np.abs(found - expected).max() < 0.02 * np.abs(expected).max()
    assert executor.kv_layout.group_bytes == (size // 4,) * 2
    content = executor.read_blocks(int32(0, 1, 2))
    executor.write_blocks(int32(10, 11, 12), content)
    assert executor.read_blocks(int32(10, 11, 12)) == content


def test_blocks_read_copied_and_written_keep_a_sequence(executor: OrtExecutor) -> None:
    executor.step(make_batch([(0, IDS[:22])], rows=[]))
    last = make_batch([(22, IDS[22:])])
    expected = executor.step(last)
    moved = np.random.default_rng(1).permutation(np.arange(6, BLOCKS))[:6].astype(np.int32)
    there = replace(
        last,
        block_table=moved[last.block_table],
        slot_mapping=(moved[last.slot_mapping // PAGE] * PAGE + last.slot_mapping % PAGE).astype(np.int32),
    )
    pages = np.arange(6, dtype=np.int32)
    saved = read_all(executor, pages)
    assert sum(map(len, saved)) == 6 * executor.kv_layout.bytes_per_block

    for group in range(2):
        executor.copy_blocks(pages, moved, group)
    np.testing.assert_array_equal(executor.step(there), expected)
    assert read_all(executor, moved) == saved

    executor.allocate_kv(BLOCKS, PAGE, "f32")
    assert not any(map(any, read_all(executor, moved)))
    for group in range(2):
        executor.write_blocks(moved, saved[group], group)
    np.testing.assert_array_equal(executor.step(there), expected)


def test_pages_of_a_window_group_are_its_own(executor: OrtExecutor) -> None:
    executor.step(make_batch([(0, IDS)], rows=[]))
    pages, other = int32(0, 1), int32(7, 8)
    before = read_all(executor, int32(0, 1, 7, 8))
    saved = executor.read_blocks(pages, 1)
    executor.copy_blocks(pages, other, 1)
    assert executor.read_blocks(other, 1) == saved
    executor.write_blocks(int32(0), saved[: len(saved) // 2], 0)
    assert executor.read_blocks(int32(0, 1, 7, 8), 0)[len(saved) // 2 :] == before[0][len(saved) // 2 :]
    assert executor.read_blocks(pages, 1) == saved
    assert read_all(executor, int32(0, 1, 7, 8)) != before


def test_pages_that_swap_are_all_read_first(executor: OrtExecutor) -> None:
    executor.step(make_batch([(0, IDS)], rows=[]))
    one, two = (executor.read_blocks(int32(i)) for i in (0, 1))
    executor.copy_blocks(int32(0, 1), int32(1, 0))
    assert executor.read_blocks(int32(0, 1)) == two + one
    assert one != two
