"""Waiting requests let another compute the prefix that they have in common."""

from collections.abc import Sequence

from ..kvcache import KvCache
from .sequence_state import SequenceState


def follows_another(sequence: SequenceState, running: Sequence[SequenceState], cache: KvCache) -> bool:
    """Whether a waiting sequence had better not start yet: one that is running, and comes before it in the
    order, is computing a longer prefix of its tokens than the cache has, by a page or more. There are only so
    many of these, and each runs to its end or leaves: so none waits forever."""
    if not (cache.shares_prefixes and sequence.adopts):
        return False
    if sequence.follows is not None:
        leader, common = sequence.follows
        if leader.is_running and leader.computed < common:
            return True
        sequence.follows = None
    size = cache.page_size
    best, longest = None, 0
    for other in running:
        if other.remaining > 1 and other.order < sequence.order:
            common = common_length(other.tokens, sequence.tokens[:-1]) // size * size
            if common > max(longest, other.computed):
                best, longest = other, common
    if best is None or longest - cache.match(sequence.tokens) < size:
        return False
    sequence.follows = (best, longest)
    return True


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first items are the same. Compares stretches, which is faster than one by one."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low
