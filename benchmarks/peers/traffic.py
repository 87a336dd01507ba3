"""Requests that arrive over time, and when each of their tokens was there: what the workers of
`benchmarks/engine.py` run.

    {"do": "traffic", "arrivals": [[seconds, [token id, ...], new tokens], ...], "until": null}
        ->  {"times": [[seconds, ...], ...]}

Times are from the traffic's start, one for each token of each answer, taken when whoever asked could read it.
With `until`, the traffic ends with that request's first token, and the others' answers are as long as they
are then. Like `protocol.py` this runs in the peer's own Python, with nothing but the standard library.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Arrival:
    at: float  # seconds after the start
    prompt: list[int]
    new_tokens: int


class Steps(Protocol):
    """A runtime with a batch that goes on step by step. Decoding is greedy, and no end token ends it."""

    def add(self, request: int, prompt: list[int], new_tokens: int) -> None:
        """Queues a request."""
        ...

    def step(self) -> Iterable[tuple[int, int]]:
        """Runs a step. Returns the requests that got tokens in it, and how many."""
        ...

    def cancel(self) -> None:
        """Ends all that runs."""
        ...


def drive(runtime: Steps, arrivals: list[Arrival], until: int | None) -> list[list[float]]:
    """Adds each request between two steps once it has come, and notes the times."""
    times: list[list[float]] = [[] for _ in arrivals]
    coming = sorted(range(len(arrivals)), key=lambda i: arrivals[i].at, reverse=True)
    running: set[int] = set()
    start = time.perf_counter()
    while coming or running:
        now = time.perf_counter() - start
        while coming and arrivals[coming[-1]].at <= now:
            index = coming.pop()
            running.add(index)
            runtime.add(index, arrivals[index].prompt, arrivals[index].new_tokens)
        if not running:
            time.sleep(max(0.0, arrivals[coming[-1]].at - now))
            continue
        got = runtime.step()
        now = time.perf_counter() - start
        for index, count in got:
            times[index] += [now] * count
            if len(times[index]) >= arrivals[index].new_tokens:
                running.discard(index)
        if until is not None and times[until]:
            runtime.cancel()
            break
    return times


def traffic(runtime: Any, arrivals: list[Any], until: int | None = None) -> dict[str, Any]:
    """`runtime` drives traffic by itself, or is a `Steps`."""
    requests = [Arrival(at, prompt, new_tokens) for at, prompt, new_tokens in arrivals]
    times = (
        runtime.traffic(requests, until) if hasattr(runtime, "traffic") else drive(runtime, requests, until)
    )
    lengths = [len(each) for each in times]
    if until is None and lengths != [request.new_tokens for request in requests]:
        raise RuntimeError(f"{lengths} tokens; expected {[request.new_tokens for request in requests]}")
    return {"times": times}
