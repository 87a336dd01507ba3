"""The heap against a plain list that is sorted each time."""

from hypothesis import given
from hypothesis import strategies as st

from nybble.runtime.removable_heap import RemovableHeap

OPERATION = st.one_of(
    st.tuples(st.just("push"), st.integers(0, 20), st.integers(-5, 5)),
    st.tuples(st.just("discard"), st.integers(0, 20), st.just(0)),
    st.tuples(st.just("pop"), st.just(0), st.just(0)),
)


@given(operations=st.lists(OPERATION, max_size=200))
def test_the_least_key_comes_first_whatever_was_taken_out(operations: list[tuple[str, int, int]]) -> None:
    heap: RemovableHeap[int] = RemovableHeap()
    items: dict[int, tuple[float, int]] = {}
    for number, (what, item, key) in enumerate(operations):
        if what == "push" and item not in items:
            items[item] = (float(key), number)
            heap.push(item, items[item])
        elif what == "discard":
            assert heap.discard(item) == (items.pop(item, None) is not None)
        elif what == "pop" and items:
            first = min(items, key=items.__getitem__)
            assert heap.peek() == first
            assert heap.least_key() == items[first][0]
            heap.discard(first)
            del items[first]
        assert len(heap) == len(items)
        assert (heap.peek() is None) == (not items)


def test_what_was_taken_out_takes_no_room() -> None:
    heap: RemovableHeap[int] = RemovableHeap()
    for number in range(10_000):
        heap.push(number, (float(number), 0))
        if number >= 10:
            assert heap.discard(number - 5)
    assert len(heap) == 10
    assert len(heap._entries) < 64
