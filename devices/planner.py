"""Whether a model fits, before anything is loaded: bytes for each thing that will be held."""

from dataclasses import replace

from ..errors import DoesNotFitError, SettingError
from .advice import advice, describe_need
from .memory_plan import MemoryPlan, RunSettings
from .plans import plan_memory


def check_fit(run: RunSettings) -> MemoryPlan:
    """`plan_memory`'s plan, if it keeps to the budget. Raises `DoesNotFitError` with the numbers and what
    would fit."""
    plan = plan_memory(run)
    if plan.fits:
        return plan
    raise DoesNotFitError(f"the model {describe_need(plan)}; {advice(run)}")


def fit_sequences(run: RunSettings, max_sequences: int) -> MemoryPlan:
    """The plan for as many sequences of `run.context` tokens as fit, `max_sequences` at most. Raises as
    `check_fit` does where not even one fits."""
    check_fit(replace(run, sequences=1))
    return most_sequences(run, max_sequences)


def most_sequences(run: RunSettings, max_sequences: int) -> MemoryPlan:
    """The plan for as many sequences as fit; for one where none does."""
    if max_sequences < 1:
        raise SettingError(f"max_sequences is {max_sequences}; expected at least 1")
    best, low, high = plan_memory(replace(run, sequences=1)), 1, max_sequences + 1
    while high - low > 1:
        middle = (low + high) // 2
        plan = plan_memory(replace(run, sequences=middle))
        if plan.fits:
            best, low = plan, middle
        else:
            high = middle
    return best
