"""How torch's threads are used where operations are many and small."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """For many small operations in a row: dividing one between threads gains little, and each waits for all
    of them, for milliseconds where another process has taken a core."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def in_parallel(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """The function's results, in order. As many calls run at once as torch has threads, each on one; so they
    never wait for one another. torch holds no lock while it computes."""
    import torch

    threads = torch.get_num_threads()
    with one_thread():
        if threads == 1:
            return [function(item) for item in items]

        def call(item: Item) -> Result:
            with torch.no_grad():  # which is a setting of each thread
                return function(item)

        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(call, items))
