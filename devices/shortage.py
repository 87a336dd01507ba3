"""What to say where memory ran out although the plan had it."""

from dataclasses import replace

from .advice import advice, describe_need
from .memory_plan import MemoryPlan, RunSettings
from .probe import probe
from .process import peak_resident_bytes, resident_bytes
from .sizes import format_bytes


def describe_shortage(run: RunSettings, plan: MemoryPlan) -> str:
    """One line: the parts of `plan`, what was measured beside it, and the cheapest ways to need no more than
    there is now. `run` is what was planned."""
    resident, peak = resident_bytes(), peak_resident_bytes()
    available = probe(providers=False).usable_memory
    said = ((resident, "resident"), (peak, "at most"), (available, "available"))
    measured = ", ".join(f"{format_bytes(size)} {what}" for size, what in said if size is not None)
    there = plan.total - 1
    if resident is not None and available is not None:
        there = min(there, resident + available)
    smaller = replace(
        run, kv_dtype=plan.kv_dtype, token_budget=plan.token_budget, sequences=plan.sequences,
        residency=plan.residency if plan.residency.streams else None, budget=max(1, there),
    )  # fmt: skip
    return f"as planned the model {describe_need(plan)}; measured: {measured or 'nothing'}; {advice(smaller)}"
