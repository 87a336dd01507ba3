"""A conversation that has outgrown the context goes on without its oldest turns."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, Any]]

# What is kept free for the answer at most, and the step in which what is dropped grows.
SHARE = 4
HEAD_ROLES = ("system", "developer")


def fit_chat(
    messages: Messages, encode: Callable[[Messages], list[int]], context: int, max_tokens: int | None
) -> tuple[list[int], int]:
    """The token ids of the conversation, and how many of its messages were left out.

    The answer's room is `max_tokens`, at most a quarter of the context, in tokens. A conversation that
    leaves it is taken whole. From a longer one the oldest turns are left out, until it is shorter by what it
    exceeds, rounded up to whole quarters of the context: so a chat that goes on keeps the same beginning for
    many turns and finds it in the cache. A turn is a user's message with all that follows up to the next
    one, so that a tool's call and its result stay together. The system messages at the beginning stay, and
    so does the last turn, whatever their length.
    """
    ids = encode(messages)
    quarter = max(1, context // SHARE)
    excess = len(ids) + min(max_tokens or quarter, quarter) - context
    if excess <= 0:
        return ids, 0
    head = next((i for i, m in enumerate(messages) if m["role"] not in HEAD_ROLES), len(messages))
    turns = [i for i in range(head + 1, len(messages)) if messages[i]["role"] == "user"]
    if not turns:
        return ids, 0
    target = len(ids) - quarter * -(-excess // quarter)

    def without(start: int) -> list[int]:
        return encode([*messages[:head], *messages[start:]])

    # Fewer turns never take more tokens.
    position = bisect_left(turns, True, key=lambda start: len(without(start)) <= target)
    start = turns[min(position, len(turns) - 1)]
    return without(start), start - head
