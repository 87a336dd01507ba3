"""What holds between operations of the cache: checks that look at everything, for tests."""

from collections import Counter
from itertools import pairwise

from .page_store import PageStore
from .prefix_node import PrefixNode
from .prefix_tree import PrefixTree


def check_store(store: PageStore) -> None:
    """Every page is free or has as many references as holders; what is idle and what is shared is known; a
    page that may be written without a copy has one holder."""
    shared = 0
    for group, pool in enumerate(store.pools):
        held = Counter(page for holder in store.tables for page in holder.tables[group] if page >= 0)
        shared += sum(times > 1 for times in held.values())
        cached = {page for page in range(pool.num_blocks) if store.is_cached(group, page)}
        for page in range(pool.num_blocks):
            references, holders = pool.references(page), held[page] + (page in cached)
            assert references == holders, f"page {page} of group {group}: {references} references, {holders}"
        assert pool.num_free == sum(pool.references(page) == 0 for page in range(pool.num_blocks))
        assert set(store.idle[group]) == {page for page in cached if not held[page]}
        for holder in store.tables:
            if (pages := holder.writable_pages) is not None:
                assert pool.references(pages[group]) == 1, f"page {pages[group]} of group {group} is shared"
    assert store.num_shared == shared


def check_tree(tree: PrefixTree, store: PageStore) -> None:
    """The tree is a tree, has the pages that the store says it has, each once and where it is looked for, and
    can give up its idle pages in their order."""
    groups, size = range(len(store.pools)), tree.page_size
    found: list[list[int]] = [[] for _ in groups]
    age = [{page: number for number, page in enumerate(idle)} for idle in store.idle]
    stack: list[PrefixNode] = [tree.root]
    assert tree.root.parent is None
    assert tree.root.start == tree.root.stop == 0
    while stack:
        node = stack.pop()
        length = node.stop - node.start
        assert all(len(pages) == length for pages in node.pages)
        assert len(node.tokens) == length * size
        assert length or node is tree.root
        if length and not node.children:
            assert any(pages[-1] >= 0 for pages in node.pages), "a leaf ends without a page"
        for group, pages in enumerate(node.pages):
            found[group] += [page for page in pages if page >= 0]
            full = tree.windows[group] is None
            assert not full or min(pages, default=0) >= 0, "a page is missing before others"
            for index, page in enumerate(pages):
                assert page < 0 or tree.place(group, page) == (node, node.start + index)
            if full:
                steps = list(pairwise(pages))
                if pages:
                    steps += [(pages[-1], child.pages[group][0]) for child in node.children.values()]
                for page, after in steps:
                    if page in age[group]:
                        assert age[group].get(after, len(age[group])) < age[group][page]
        assert node.keys == sorted(node.children)
        for key, child in node.children.items():
            assert child.parent is node
            assert child.start == node.stop
            assert child.key(size) == key
            stack.append(child)
    for group in groups:
        assert len(found[group]) == len(set(found[group]))
        assert all(store.is_cached(group, page) for page in found[group])
    assert sum(map(len, found)) == store.num_cached
