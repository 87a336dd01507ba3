"""The engine driven by hand, and the answers that a plain loop over the whole text gives."""

from typing import Any

import numpy as np

from nybble.runtime.engine import Engine
from nybble.runtime.sampler import sample
from nybble.runtime.sampling_params import ResolvedSampling, SamplingParams
from nybble.runtime.sequence import Request, Sequence

PROMPT = [5, 9, 33, 12, 7, 60, 41, 2, 18]


def greedy(max_tokens: int = 30, **others: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **others)


def run(engine: Engine) -> None:
    for _ in range(10_000):
        if not engine.has_work:
            return
        engine.step()
    raise AssertionError("the engine does not come to an end")


def answer(engine: Engine, prompt: list[int], **params: Any) -> Sequence:
    sequence = engine.add(Request("one", tuple(prompt), SamplingParams(**params)))
    run(engine)
    return sequence


def expected_tokens(
    executor: Any, prompt: list[int], count: int, sampling: Any = None, seed: int = 0
) -> list[int]:
    """Tokens of a plain loop that computes the whole text anew for each of them, up to an end token."""
    tokens = list(prompt)
    for _ in range(count):
        row = executor.reference(tokens)[-1]
        chosen = sampling or ResolvedSampling()
        seen = np.unique(tokens)
        tokens.append(sample(row, chosen, seed=seed, index=0, position=len(tokens), seen=seen))
        if tokens[-1] == 0:
            break
    return tokens[len(prompt) :]


def reference_without_end(executor: Any, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(np.argmax(executor.reference(tokens)[-1])))
    return tokens[len(prompt) :]


def sampled(
    executor: Any, prompt: list[int], count: int, temperature: float, seed: int, index: int
) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        row = executor.reference(tokens)[-1]
        sampling = ResolvedSampling(temperature=temperature)
        tokens.append(sample(row, sampling, seed=seed, index=index, position=len(tokens)))
        if tokens[-1] == 0:
            break
    return tokens[len(prompt) :]


def check_pages(engine: Engine, live: list[Sequence], blocks: int) -> None:
    held = {page for sequence in live for page in sequence.blocks.tables[0]}
    assert len(held) == blocks - engine.pages_free
    engine.cache.check()
