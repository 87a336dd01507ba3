"""`PrefixTree`: which pages hold which tokens."""

from array import array
from collections.abc import Sequence

from ..records import dataclass
from .page_store import PageStore
from .prefix_node import PrefixNode, common_length


@dataclass(frozen=True)
class Match:
    """What the tree has of some tokens, beyond the pages that were there already."""

    num_tokens: int  # those before included
    pages: "tuple[array[int], ...]"  # [G][...] full pages, to be shared; −1 where no later token looks
    partial: tuple[int, ...] | None  # of each group, a page that agrees on the remaining tokens, to be copied
    node: PrefixNode  # holds the last full page


class PrefixTree:
    """A radix tree over full pages of tokens. An edge holds as many pages as follow each other without a
    branch; it is cut at a page's border where a prefix leaves it, and grows where it ends in a leaf.

    The tree holds one reference to each page in it. A page that no table holds besides is idle and may be
    evicted: in groups without a window from the end of a leaf, which is where the least recently used one is
    (`PageStore.idle`); in groups with a window anywhere, and a match must then do without.
    No operation looks at more of the tree than the pages of its own tokens.
    """

    def __init__(self, store: PageStore, page_size: int, windows: Sequence[int | None]) -> None:
        self._store = store
        self._page_size = page_size
        self._windows = tuple(windows)
        self._groups = range(len(self._windows))
        self.root = PrefixNode(None, 0, array("i"), tuple(array("i") for _ in self._groups))
        # Where a page in the tree is: its node, and how many pages come before it.
        num_blocks = store.pools[0].num_blocks
        self._node_of: list[list[PrefixNode | None]] = [[None] * num_blocks for _ in self._groups]
        self._depth_of = [array("i", bytes(4 * num_blocks)) for _ in self._groups]
        self.num_evicted = 0  # pages so far, all groups together
        store.evict_with(self.evict)

    @property
    def page_size(self) -> int:
        return self._page_size

    @property
    def windows(self) -> tuple[int | None, ...]:
        return self._windows

    def place(self, group: int, page: int) -> tuple[PrefixNode | None, int]:
        """Where a page in the tree is: its node, and how many pages come before it."""
        return self._node_of[group][page], self._depth_of[group][page]

    def match(
        self,
        tokens: Sequence[int],
        limit: int,
        node: PrefixNode,
        depth: int,
        held: Sequence[int],
        *,
        copy: bool = True,
    ) -> Match:
        """The longest usable match of `tokens[:limit]`, from page `depth` on, which is a place in `node` or
        at its end. Of the pages before that, those from `held[g]` on are there in window group g. Without
        `copy` it ends with a full page. Nothing changes."""
        limit = max(0, limit)
        size, start = self._page_size, depth
        pages = tuple(array("i") for _ in self._groups)
        partial: tuple[int, ...] | None = None
        node = node.upwards(depth)
        rest = 0  # tokens after the last full page
        while True:
            begin = depth - node.start
            ours = array("i", tokens[depth * size : min(limit, node.stop * size)])
            edge = node.tokens[begin * size : begin * size + len(ours)]
            full, rest = divmod(common_length(ours, edge), size)
            for found, of_node in zip(pages, node.pages, strict=True):
                found += of_node[begin : begin + full]
            depth += full
            if depth < node.stop:
                if rest and copy:
                    partial = tuple(of_node[begin + full] for of_node in node.pages)
                break
            key = tuple(tokens[depth * size : min(limit, (depth + 1) * size)])
            child = node.children.get(key)
            if child is None:
                child, rest = node.nearest(key)
                if child is not None and copy:
                    partial = tuple(of_node[0] for of_node in child.pages)
                break
            node = child
        num_tokens = depth * size + (rest if partial is not None else 0)
        return self._usable(Match(num_tokens, pages, partial, node), start, held)

    def _usable(self, match: Match, start: int, held: Sequence[int]) -> Match:
        """The match, cut to the longest length for which every window group has the pages that the next token
        sees."""
        since = {group: held[group] for group, w in enumerate(self._windows) if w is not None}
        if not since:
            return match
        size, num_tokens, partial = self._page_size, match.num_tokens, match.partial
        # `since`: from which page on a group has all of them, up to the one looked at.
        longest = start
        for depth in range(start + 1, start + len(match.pages[0]) + 1):
            for group in since:
                if match.pages[group][depth - 1 - start] < 0:
                    since[group] = depth
            if self._sees(depth * size, since):
                longest = depth
        if partial is None or min(partial) < 0 or not self._sees(num_tokens, since):
            num_tokens, partial = longest * size, None
        stop = num_tokens // size
        pages = []
        for group, found in enumerate(match.pages):
            hidden = max(0, min(self._first(group, num_tokens), stop) - start)
            pages.append(array("i", [-1] * hidden) + found[hidden : stop - start])
        return Match(num_tokens, tuple(pages), partial, match.node.upwards(stop))

    def _sees(self, num_tokens: int, since: dict[int, int]) -> bool:
        """Whether the token after that many has what it sees, where groups have their pages from `since`."""
        return all(self._first(group, num_tokens) >= page for group, page in since.items())

    def _first(self, group: int, num_tokens: int) -> int:
        return first_visible(self._windows[group], num_tokens) // self._page_size

    def insert(
        self, tokens: Sequence[int], tables: "Sequence[array[int]]", node: PrefixNode, depth: int, stop: int
    ) -> PrefixNode:
        """Pages `depth` to `stop` of a sequence's tables, whose tokens are computed, enter the tree. Where it
        has them already, the tables take the tree's and give their own back. Returns the node that holds the
        last one."""
        size = self._page_size
        node = node.upwards(depth)
        while depth < stop:
            if depth == node.stop:
                child = node.children.get(tuple(tokens[depth * size : (depth + 1) * size]))
                if child is None:
                    return self._grow(node, tokens, tables, stop)
                node = child
            begin = depth - node.start
            ours = array("i", tokens[depth * size : min(stop, node.stop) * size])
            edge = node.tokens[begin * size : begin * size + len(ours)]
            same = common_length(ours, edge) // size
            for index in range(depth, depth + same):
                self._merge(node, index, tables)
            depth += same
            if depth < min(stop, node.stop):
                return self._grow(self._split(node, depth), tokens, tables, stop)
        return node

    def _merge(self, node: PrefixNode, depth: int, tables: "Sequence[array[int]]") -> None:
        for group, table in enumerate(tables):
            of_node, index = node.pages[group], depth - node.start
            ours, theirs = table[depth], of_node[index]
            if ours == theirs or ours < 0:
                continue
            if theirs < 0:
                of_node[index] = ours
                self._place(group, ours, node, depth)
                self._store.cache(group, ours)
            else:
                self._store.hold(group, (theirs,))
                self._store.drop(group, (ours,))
                table[depth] = theirs

    def _split(self, node: PrefixNode, depth: int) -> PrefixNode:
        """Cuts a node before page `depth`; returns the part above, which is a new one, so that the work is
        bounded by the pages that led here."""
        size, count = self._page_size, depth - node.start
        parent, key = node.parent, node.key(size)
        assert parent is not None
        upper = PrefixNode(
            parent, node.start, node.tokens[: count * size], tuple(p[:count] for p in node.pages)
        )
        parent.children[key] = upper
        del node.tokens[: count * size]
        for of_node in node.pages:
            del of_node[:count]
        node.start, node.parent = depth, upper
        upper.add(node.key(size), node)
        for group, of_node in enumerate(upper.pages):
            places = self._node_of[group]
            for page in of_node:
                if page >= 0:
                    places[page] = upper
        return upper

    def _grow(
        self, node: PrefixNode, tokens: Sequence[int], tables: "Sequence[array[int]]", stop: int
    ) -> PrefixNode:
        """Pages that the tree lacks come after `node`: in it, when it is a leaf."""
        size, depth = self._page_size, node.stop
        added = array("i", tokens[depth * size : stop * size])
        if node.parent is not None and not node.children:
            node.tokens += added
            for of_node, table in zip(node.pages, tables, strict=True):
                of_node += table[depth:stop]
        else:
            pages = tuple(table[depth:stop] for table in tables)
            child = PrefixNode(node, depth, added, pages)
            node.add(child.key(size), child)
            node = child
        for group, table in enumerate(tables):
            for index in range(depth, stop):
                if (page := table[index]) >= 0:
                    self._place(group, page, node, index)
                    self._store.cache(group, page)
        return self._trim(node)

    def _place(self, group: int, page: int, node: PrefixNode, depth: int) -> None:
        self._node_of[group][page] = node
        self._depth_of[group][page] = depth

    def evict(self, group: int) -> None:
        """Frees the group's least recently used idle page; from a group without a window, the pages of the
        same tokens in the other groups with it."""
        page = next(iter(self._store.idle[group]))
        node, depth = self._node_of[group][page], self._depth_of[group][page]
        assert node is not None
        if self._windows[group] is None:
            assert depth == node.stop - 1, "an idle page comes after another"
            assert not node.children, "an idle page comes after another"
            for each in self._groups:
                self._give_up(each, node, depth)
        else:
            self._give_up(group, node, depth)
        self._trim(node)

    def _give_up(self, group: int, node: PrefixNode, depth: int) -> None:
        of_node, index = node.pages[group], depth - node.start
        if (page := of_node[index]) >= 0:
            of_node[index] = -1
            self._node_of[group][page] = None
            self._store.uncache(group, page)
            self.num_evicted += 1

    def _trim(self, node: PrefixNode) -> PrefixNode:
        """Takes places without a page from the end of a leaf, and leaves without a place from the tree.
        Returns the node that is left."""
        size = self._page_size
        while (parent := node.parent) is not None and not node.children:
            key = node.key(size)
            while node.stop > node.start and all(of_node[-1] < 0 for of_node in node.pages):
                del node.tokens[-size:]
                for of_node in node.pages:
                    of_node.pop()
            if node.stop > node.start:
                break
            parent.remove(key)
            node = parent
        return node


def first_visible(window: int | None, num_tokens: int) -> int:
    """The first token that the one after `num_tokens` others sees."""
    return 0 if window is None else max(0, num_tokens - window + 1)
