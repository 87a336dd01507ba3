"""What to say where a model does not fit: the numbers, and the cheapest ways to make it fit."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

from ..records import dataclass
from .memory_plan import SMALLEST_STEP, MemoryPlan, RunSettings
from .plans import plan_memory
from .prediction import Rates, predict
from .sizes import format_bytes
from .streaming import least_residency, residencies

MOST_WAYS = 3


@dataclass(frozen=True)
class Way:
    """A change that makes a run fit: what it is, the peak it then has, and the predicted tokens per second
    of one answer; None where nothing is known of the device's speed."""

    change: str
    total: int  # bytes
    decode: float | None

    def __str__(self) -> str:
        speed = "" if self.decode is None else f", {self.decode:.3g} tokens/s predicted"
        return f"{self.change} ({format_bytes(self.total)}{speed})"


def describe_need(plan: MemoryPlan, at_least: bool = False) -> str:
    """One line with the numbers: the peak, its parts and the budget."""
    budget = "no budget" if plan.budget is None else f"the memory budget is {format_bytes(plan.budget)}"
    parts = [f"weights {format_bytes(plan.weights + plan.packed)}"]
    if plan.packed:
        parts[0] += f" ({format_bytes(plan.packed)} of it ONNX Runtime's packed copy)"
    if plan.buffers:
        parts.append(f"buffers of streamed weights {format_bytes(plan.buffers)}")
    together = f"{plan.sequences} x {plan.context}" if plan.sequences > 1 else f"{plan.context}"
    parts += [
        f"KV cache {format_bytes(plan.kv)} for {together} tokens in {plan.kv_dtype}",
        f"activations {format_bytes(plan.activations)} for steps of {plan.token_budget} tokens",
    ]
    if plan.runtime:
        parts.append(f"tokenizer {format_bytes(plan.tokenizer)}")
        parts.append(f"interpreter and libraries {format_bytes(plan.interpreter)}")
    need = "needs at least" if at_least else "needs"
    return f"{need} {format_bytes(plan.total)}, {budget}: " + ", ".join(parts)


def advice(run: RunSettings) -> str:
    """The ways that would fit, on one line, or that none would."""
    ways = ways_to_fit(run)
    if ways:
        return "what would fit: " + "; ".join(map(str, ways))
    *_, (_, least) = _changed(replace(run, context=1))
    return f"no context would fit, since one token needs {format_bytes(plan_memory(least).total)}"


def ways_to_fit(run: RunSettings) -> tuple[Way, ...]:
    """The cheapest ways that make `run`, which does not fit, do so: those of the fewest changes, of as
    many the fastest first; three at most."""
    found: list[tuple[int, Way]] = []
    enough: list[set[str]] = []  # changes that do it without more
    for words, changed in _changed(run):
        if any(fewer <= set(words) for fewer in enough):
            continue
        if plan_memory(changed).fits:
            enough.append(set(words))
            found.append((len(words), _way(words, changed)))
        elif context := _longest_context(changed):
            shorter = replace(changed, context=context)
            found.append((len(words) + 1, _way((f"a context of {context} tokens", *words), shorter)))
    found.sort(key=lambda each: (each[0], -(each[1].decode or 0)))
    return tuple(way for _, way in found[:MOST_WAYS])


def _changed(run: RunSettings) -> Iterator[tuple[tuple[str, ...], RunSettings]]:
    """The run as it is, with each change but that of its context, and with several of them."""
    changes: list[tuple[str, dict[str, object]]] = []
    if run.sequences > 1:
        changes.append(("one sequence at a time", {"sequences": 1}))
    if run.tokens > SMALLEST_STEP:
        changes.append((f"steps of {SMALLEST_STEP} tokens", {"token_budget": SMALLEST_STEP}))
    if run.recipe is not None and run.recipe.bits == 8:
        changes.append(("4 bits", {"recipe": replace(run.recipe, bits=4)}))
    if run.executor == "cpu" and run.kv != "int8":
        changes.append(("kv_dtype int8", {"kv_dtype": "int8"}))
    if run.executor == "cpu" and run.residency is None:
        least = least_residency(run.spec)
        changes.append(("weights streamed under memory_budget", {"residency": least}))
    for count in range(len(changes) + 1):
        for some in combinations(changes, count):
            settings: dict[str, object] = {}
            for _, change in some:
                settings |= change
            yield tuple(words for words, _ in some), replace(run, **settings)  # type: ignore[arg-type]


def _way(words: tuple[str, ...], run: RunSettings) -> Way:
    plan = plan_memory(run)
    if plan.residency.streams:  # no more of them than needs be
        fewer = (replace(run, residency=residency) for residency in residencies(run))
        run = next(some for some in fewer if plan_memory(some).fits)
        plan = plan_memory(run)
    speeds = predict(run, plan, Rates.of(run.profile))
    return Way(" and ".join(words), plan.total, speeds.decode if speeds else None)


def _longest_context(run: RunSettings) -> int:
    """The most tokens that fit, 0 where none do."""
    low, high = 0, run.length
    while high - low > 1:
        middle = (low + high) // 2
        if plan_memory(replace(run, context=middle)).fits:
            low = middle
        else:
            high = middle
    return low
