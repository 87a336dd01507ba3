"""A run made to fit into a memory budget: what is given up first, and how little can be done with."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..errors import DoesNotFitError
from .advice import advice, describe_need
from .memory_plan import SMALLEST_STEP, MemoryPlan, RunSettings
from .planner import most_sequences
from .plans import plan_memory
from .profile import KvDtype
from .streaming import residencies, total_experts


def plan_within(
    run: RunSettings,
    budget: int,
    *,
    max_sequences: int | None = None,
    kv_dtypes: Sequence[KvDtype] = (),
) -> MemoryPlan:
    """The plan that keeps to `budget` bytes and gives up least, in this order:

    1. sequences at once, down to one; those that find no room wait;
    2. tokens of a step, down to 64: prompts are computed in smaller pieces;
    3. experts of mixtures in memory, which then are read when they are chosen, but for those chosen most;
    4. layers in memory: as few are streamed as need be, at equal distances;
    5. the head in memory, then all but two buffers and two experts;
    6. the cache's type: `kv_dtypes` are those that may stand for `run.kv`, best first. Only this one changes
       what the model answers.

    What is over gives steps more tokens, and then holds more sequences, up to `max_sequences`, which is
    `run.sequences` by default. `run`'s own budget and residency are not looked at. Raises `DoesNotFitError`
    with the numbers and what would fit where the least there is, `smallest_plan`, is too much.
    """
    asked = run.sequences if max_sequences is None else max_sequences
    run = replace(run, budget=budget, sequences=1, residency=None)
    for kv_dtype in (run.kv, *kv_dtypes):
        for smaller in _smaller(replace(run, kv_dtype=kv_dtype)):
            if plan_memory(smaller).fits:
                plan = most_sequences(_with_most_tokens(smaller, run.tokens), asked)
                return replace(plan, concessions=_concessions(plan, run, asked))
    last = _smallest(run, (run.kv, *kv_dtypes)[-1])
    raise DoesNotFitError(f"the model {describe_need(plan_memory(last), at_least=True)}; {advice(last)}")


def smallest_plan(run: RunSettings) -> MemoryPlan:
    """The least that one sequence of `run.length` tokens with a cache in `run.kv` can do with: all weights
    streamed."""
    return plan_memory(_smallest(run, run.kv))


def _smaller(run: RunSettings) -> Iterator[RunSettings]:
    """`run`, and then what takes less and less memory."""
    steps = _steps(run.tokens)
    yield from (replace(run, token_budget=tokens) for tokens in steps)
    if run.executor == "cpu":
        run = replace(run, token_budget=steps[-1])
        yield from (replace(run, residency=residency) for residency in residencies(run))


def _with_most_tokens(run: RunSettings, tokens: int) -> RunSettings:
    """`run`, which fits, with as many tokens a step as fit, up to `tokens`."""
    larger = (replace(run, token_budget=each) for each in _steps(tokens))
    return next((each for each in larger if plan_memory(each).fits), run)


def _smallest(run: RunSettings, kv_dtype: KvDtype) -> RunSettings:
    *_, last = _smaller(replace(run, kv_dtype=kv_dtype, sequences=1, residency=None))
    return last


def _steps(tokens: int) -> list[int]:
    """The token budget, and half of it, until the next would be too small."""
    steps = [tokens]
    while steps[-1] // 2 >= SMALLEST_STEP:
        steps.append(steps[-1] // 2)
    return steps


def _concessions(plan: MemoryPlan, run: RunSettings, asked: int) -> tuple[str, ...]:
    """What `plan` gave up of `run` with `asked` sequences, a sentence each."""
    said, residency = [], plan.residency
    if plan.sequences < asked:
        said.append(f"{plan.sequences} of {asked} sequences run at once")
    if plan.token_budget < run.tokens:
        said.append(f"steps have {plan.token_budget} tokens at most, not {run.tokens}")
    if residency.expert_slots:
        experts = total_experts(run.spec)
        said.append(f"{residency.expert_slots} of {experts} experts are in memory, the others streamed")
    if residency.streamed_layers:
        said.append(f"{len(residency.streamed_layers)} of {residency.num_layers} layers are streamed")
    if residency.streamed_head:
        said.append("the head is streamed")
    if plan.kv_dtype != run.kv:
        said.append(f"the KV cache is {plan.kv_dtype}, not {run.kv}")
    return tuple(said)
