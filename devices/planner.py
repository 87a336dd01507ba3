"""Whether a model fits, before anything is loaded: bytes for each thing that will be held."""

from dataclasses import replace

from ..errors import DoesNotFitError, SettingError
from .cpu_memory import plan_on_kernels
from .memory_plan import MemoryPlan, RunSettings
from .ort_memory import plan_on_ort
from .sizes import format_bytes


def plan_memory(run: RunSettings) -> MemoryPlan:
    """What running a model holds. Raises `SettingError` where its executor cannot run it."""
    return plan_on_kernels(run) if run.executor == "cpu" else plan_on_ort(run)


def check_fit(run: RunSettings) -> MemoryPlan:
    """`plan_memory`'s plan, if it keeps to the budget. Raises `DoesNotFitError` with the numbers and what
    would fit."""
    plan = plan_memory(run)
    if plan.fits:
        return plan
    raise DoesNotFitError(f"the model {describe_need(plan)}; {_advice(run)}")


def fit_sequences(run: RunSettings, max_sequences: int) -> MemoryPlan:
    """The plan for as many sequences of `run.context` tokens as fit, `max_sequences` at most. Raises as
    `check_fit` does where not even one fits."""
    if max_sequences < 1:
        raise SettingError(f"max_sequences is {max_sequences}; expected at least 1")
    best, low, high = check_fit(replace(run, sequences=1)), 1, max_sequences + 1
    while high - low > 1:
        middle = (low + high) // 2
        plan = plan_memory(replace(run, sequences=middle))
        if plan.fits:
            best, low = plan, middle
        else:
            high = middle
    return best


def describe_need(plan: MemoryPlan) -> str:
    """One line with the numbers: the peak, its parts and the budget."""
    budget = "no budget" if plan.budget is None else f"the memory budget is {format_bytes(plan.budget)}"
    parts = [f"weights {format_bytes(plan.weights + plan.packed)}"]
    if plan.packed:
        parts[0] += f" ({format_bytes(plan.packed)} of it ONNX Runtime's packed copy)"
    together = f"{plan.sequences} x {plan.context}" if plan.sequences > 1 else f"{plan.context}"
    parts += [
        f"KV cache {format_bytes(plan.kv)} for {together} tokens in {plan.kv_dtype}",
        f"activations {format_bytes(plan.activations)}",
    ]
    if plan.runtime:
        parts.append(f"interpreter and libraries {format_bytes(plan.runtime)}")
    return f"needs {format_bytes(plan.total)}, {budget}: " + ", ".join(parts)


def _advice(run: RunSettings) -> str:
    """The longest context that fits, with one sequence if need be, or that none does."""

    def fits(context: int, sequences: int) -> bool:
        return plan_memory(replace(run, context=context, sequences=sequences)).fits

    for together in sorted({run.sequences, 1}, reverse=True):
        low, high = 0, run.length  # high does not fit, unless fewer sequences make it
        if fits(high, together):
            low = high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle, together) else (low, middle)
        if low:
            beside = "" if together == run.sequences else ", one sequence at a time"
            return f"a context of {low} tokens{beside} would fit"
    least = plan_memory(replace(run, context=1, sequences=1))
    return f"no context would fit, since one token needs {format_bytes(least.total)}"
