"""The scheduler and the cache under 5,000 requests, as `benchmarks/simulate.py` runs 100,000."""

import importlib.util
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def simulate() -> Any:
    path = Path(__file__).parents[2] / "benchmarks" / "simulate.py"
    spec = importlib.util.spec_from_file_location("simulate", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["simulate"] = module
    spec.loader.exec_module(module)
    return module


class Watch:
    """Counts the function calls of some steps, and looks at the cache now and then."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, simulation: Any) -> None:
        sys.setprofile(None)
        if simulation.steps % 500 == 0:
            simulation.cache.check()
        assert len(simulation.scheduler.running) <= simulation.machine.max_sequences
        self.calls.append(0)
        if simulation.steps % 10 == 0:
            sys.setprofile(self._count)

    def _count(self, frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            self.calls[-1] += 1


def test_everyone_is_served_in_order_of_urgency_at_a_cost_that_does_not_grow(simulate: Any) -> None:
    workload = simulate.Workload(requests=5000, prompt=(8, 120), answer=(4, 24), system_prompt=64, load=0.9)
    run = simulate.Simulation(workload, simulate.Machine(pages=160, max_batch_tokens=128))
    watch = Watch()
    try:
        run.run(watch)
    finally:
        sys.setprofile(None)
    report = run.report()
    assert report["finished"] + report["aborted"] == 5000
    assert report["finished"] > 4500
    run.cache.check()
    assert run.cache.pages_available == 160
    classes = report["classes"]
    waits = [classes[name]["first_token"] for name in ("urgent", "normal", "can wait")]
    assert waits[0]["p50"] < waits[1]["p50"] < waits[2]["p50"]
    # The least urgent waits as long as a normal one that came ten seconds later, and no longer.
    assert waits[2]["longest"] < waits[1]["longest"] + run.machine.ageing_seconds + 2
    counted = [calls for calls in watch.calls if calls]
    # Over many steps, so that it matters little how full they are.
    early, late = counted[: len(counted) // 2], counted[len(counted) // 2 :]
    assert statistics.mean(late) < 1.25 * statistics.mean(early)


def calls_a_step(simulate: Any, waiting: int) -> float:
    run = simulate.Simulation(simulate.Workload(requests=waiting, load=1e9), simulate.Machine())
    watch = Watch()
    for number in range(waiting):
        run._arrive(number, 0.0)
    for _ in range(200):
        run._step()
        watch(run)
    sys.setprofile(None)
    return sum(watch.calls) / sum(calls > 0 for calls in watch.calls)


def test_a_step_costs_the_same_however_many_wait(simulate: Any) -> None:
    few, many = calls_a_step(simulate, 100), calls_a_step(simulate, 10_000)
    assert few > 10
    assert many < 1.3 * few


def test_more_memory_than_there_is_preempts_and_serves_everyone(simulate: Any) -> None:
    workload = simulate.Workload(requests=400, prompt=(8, 60), answer=(40, 120), system_prompt=64, load=3)
    run = simulate.Simulation(workload, simulate.Machine(pages=40, max_batch_tokens=128))
    run.run(lambda simulation: simulation.cache.check() if simulation.steps % 20 == 0 else None)
    report = run.report()
    assert report["finished"] + report["aborted"] == 400
    assert report["preemptions"] > 50
    assert run.cache.pages_available == 40
