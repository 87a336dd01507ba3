"""`RemovableHeap`: least key first, and anything may be taken out."""

import heapq
import itertools
from typing import Generic, TypeVar

Item = TypeVar("Item")


class RemovableHeap(Generic[Item]):
    """A heap whose items, each in it at most once, can be taken out anywhere. What is taken out leaves its
    entry behind, to be skipped later; when these are the larger part, all are dropped. O(log n) an
    operation, on average."""

    def __init__(self) -> None:
        self._entries: list[tuple[tuple[float, int], int, Item]] = []
        self._live: dict[Item, int] = {}  # item to the number of its entry
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, item: Item) -> bool:
        return item in self._live

    def push(self, item: Item, key: tuple[float, int]) -> None:
        number = next(self._numbers)
        self._live[item] = number
        heapq.heappush(self._entries, (key, number, item))

    def peek(self) -> Item | None:
        """The item with the least key."""
        while self._entries:
            _, number, item = self._entries[0]
            if self._live.get(item) == number:
                return item
            heapq.heappop(self._entries)
        return None

    def least_key(self) -> float | None:
        """The first part of the least key."""
        return None if self.peek() is None else self._entries[0][0][0]

    def discard(self, item: Item) -> bool:
        """Takes the item out; False when it is not in."""
        if self._live.pop(item, None) is None:
            return False
        if len(self._entries) > 2 * len(self._live) + 16:
            self._entries = [entry for entry in self._entries if self._live.get(entry[2]) == entry[1]]
            heapq.heapify(self._entries)
        return True
