"""Pages that more sequences share than have room for whole contexts in them."""

from dataclasses import replace

from .memory_plan import MemoryPlan, RunSettings
from .plans import plan_memory


def share_pages(plan: MemoryPlan, run: RunSettings, asked: int) -> MemoryPlan:
    """`plan`, which is for fewer sequences than `asked`, with as many as the budget has room for what each
    takes besides its pages, and with as many pages as fit then. Most sequences end before their context does;
    where pages run out the last one gives its own up and waits. `run` is what was planned."""
    if plan.sequences >= asked or plan.budget is None:
        return plan
    settings = replace(
        run,
        kv_dtype=plan.kv_dtype,
        token_budget=plan.token_budget,
        residency=plan.residency,
        budget=plan.budget,
    )
    best, low, high = plan, plan.sequences, asked + 1
    while high - low > 1:
        middle = (low + high) // 2
        more = plan_memory(replace(settings, sequences=middle))
        shared = replace(more, num_pages=plan.num_pages, kv=plan.kv)
        if shared.fits:
            best, low = _with_pages(shared, more.num_pages), middle
        else:
            high = middle
    if best is plan:
        return plan
    room = best.num_pages * best.page_size // best.context
    said = f"{best.sequences} sequences share KV pages for {room} whole contexts"
    others = plan.concessions[1:]  # the first says how many of them run at once
    return replace(best, concessions=(said, *others))


def _with_pages(plan: MemoryPlan, most: int) -> MemoryPlan:
    """Up to `most` pages, as the budget has room."""
    assert plan.budget is not None
    pages = min(most, plan.num_pages + (plan.budget - plan.total) // plan.kv_page)
    return replace(plan, num_pages=pages, kv=pages * plan.kv_page)
