"""`plan_memory`: the plan of either executor."""

from .cpu_memory import plan_on_kernels
from .memory_plan import MemoryPlan, RunSettings
from .ort_memory import plan_on_ort


def plan_memory(run: RunSettings) -> MemoryPlan:
    """What running a model holds. Raises `SettingError` where its executor cannot run it."""
    return plan_on_kernels(run) if run.executor == "cpu" else plan_on_ort(run)
