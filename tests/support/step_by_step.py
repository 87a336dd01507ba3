"""A `CpuExecutor` that takes a step a call."""

from typing import Any

from nybble.runtime.cpu_executor import CpuExecutor


class StepByStep:
    """An executor that takes a step a call."""

    decode_steps = 0

    def __init__(self, executor: CpuExecutor) -> None:
        self._executor = executor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)
