"""`PrefixNode`: a run of pages in the prefix tree."""

from array import array
from bisect import bisect_left, insort

Key = tuple[int, ...]


class PrefixNode:
    """Pages `start` to `stop`, counted from the root, of every prefix that passes here: their tokens and, in
    each window group, their pages. All pages are full. A page that left its window and was given up is −1.

    Children differ in their first page. They are found by its tokens, compared one by one; sorted, the one
    that agrees longest with given tokens stands next to where these would be.
    """

    __slots__ = ("children", "keys", "pages", "parent", "start", "tokens")

    def __init__(
        self,
        parent: "PrefixNode | None",
        start: int,
        tokens: "array[int]",
        pages: "tuple[array[int], ...]",
    ) -> None:
        self.parent = parent
        self.start = start
        self.tokens = tokens  # of whole pages
        self.pages = pages  # [G][stop - start]
        self.children: dict[Key, PrefixNode] = {}
        self.keys: list[Key] = []  # of the children, sorted

    @property
    def stop(self) -> int:
        return self.start + len(self.pages[0])

    def key(self, page_size: int) -> Key:
        """The tokens of its first page."""
        return tuple(self.tokens[:page_size])

    def add(self, key: Key, child: "PrefixNode") -> None:
        self.children[key] = child
        insort(self.keys, key)

    def remove(self, key: Key) -> None:
        del self.children[key]
        del self.keys[bisect_left(self.keys, key)]

    def nearest(self, key: Key) -> "tuple[PrefixNode | None, int]":
        """The child whose first page begins with most of `key`'s tokens, and how many those are."""
        best, most = None, 0
        at = bisect_left(self.keys, key)
        for other in self.keys[max(0, at - 1) : at + 1]:
            if (common := common_length(key, other)) > most:
                best, most = self.children[other], common
        return best, most

    def upwards(self, depth: int) -> "PrefixNode":
        """The node on the way to the root, this one included, that has the page before page `depth`."""
        node = self
        while node.parent is not None and node.start >= depth:
            node = node.parent
        return node


def common_length(one: "Key | array[int]", other: "Key | array[int]") -> int:
    """How many first items are the same. Compares whole stretches, halving them."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    high -= 1
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
