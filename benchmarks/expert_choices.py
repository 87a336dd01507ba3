"""Which experts to keep of a mixture whose experts are streamed: the share in memory when they are chosen.

    python benchmarks/expert_choices.py

Choices are simulated, two of 32 experts in each of 8 layers: by popularity, the n-th expert's weight being n
to the power of minus EXPONENT, and by favourites of the text, which change every so many tokens or never do.
Rules: the least recently used makes room, with slots for all layers together or for each its own; or the one
that fewest tokens chose, where a choice counts less with every further token, as in
`runtime/kernels/expert_slots.cpp`.
"""

from collections.abc import Iterator

import numpy as np

LAYERS, EXPERTS, CHOSEN = 8, 32, 2
TOKENS, WARM = 700, 200
GROWTHS = (1.003, 1.01, 1.03)


def choices(exponent: float, favourites: int) -> Iterator[list[list[int]]]:
    """Each token's experts, layer by layer."""
    random = np.random.default_rng(1)
    weights = -exponent * np.log(np.arange(1, EXPERTS + 1))
    popularity = np.array([random.permutation(weights) for _ in range(LAYERS)])
    liked = np.zeros((LAYERS, EXPERTS))
    for token in range(TOKENS):
        if favourites and token % favourites == 0:
            liked = random.normal(size=liked.shape)
        logits = popularity + liked + random.gumbel(size=liked.shape)
        yield np.argsort(-logits, axis=1)[:, :CHOSEN].tolist()


def share_in_memory(tokens: list[list[list[int]]], slots: int, growth: float | None, divided: bool) -> float:
    """`growth` None is least recently used; `divided` gives each layer as many slots."""
    kept: dict[int, dict[tuple[int, int], None]] = {}
    score: dict[tuple[int, int], float] = {}
    room, weight, clock, found, needed = slots // LAYERS if divided else slots, 1.0, 0, 0, 0
    for number, layers in enumerate(tokens):
        weight *= growth or 1.0
        for layer, experts in enumerate(layers):
            cache = kept.setdefault(layer if divided else 0, {})
            chosen = [(layer, expert) for expert in experts]
            for key in chosen:
                clock += 1
                score[key] = clock if growth is None else score.get(key, 0.0) + weight
            for key in chosen:
                needed += number >= WARM
                found += number >= WARM and key in cache
                if key not in cache and len(cache) >= room:
                    others = [each for each in cache if each not in chosen]
                    del cache[min(others or cache, key=score.__getitem__)]
                cache[key] = None
    return found / needed


def main() -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("exponent", "favourites", "slots", "least recent", "by layer", *map(str, GROWTHS))
    for exponent in (0.0, 0.7, 1.2):
        for favourites in (0, 100):
            tokens = list(choices(exponent, favourites))
            for slots in (24, 64, 128, 192):
                found = [share_in_memory(tokens, slots, None, divided) for divided in (False, True)]
                found += [share_in_memory(tokens, slots, growth, False) for growth in GROWTHS]
                every = f"every {favourites}" if favourites else "stay"
                share = f"{slots / (LAYERS * EXPERTS):.0%}"
                table.add_row(str(exponent), every, share, *(f"{each:.0%}" for each in found))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
