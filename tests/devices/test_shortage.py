"""Memory that runs out although the plan had it."""

from dataclasses import replace

import pytest
from planned import INT4, LAPTOP, SMOLLM2

from nybble.devices import RunSettings, describe_shortage, plan_memory, probe, shortage

RUN = RunSettings(SMOLLM2, INT4, LAPTOP, context=4096, kv_dtype="f16", sequences=4, executor="cpu")


def test_the_line_has_the_plan_what_was_measured_and_three_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = replace(probe(providers=False), usable_memory=100_000_000)
    monkeypatch.setattr(shortage, "probe", lambda providers: machine)
    monkeypatch.setattr(shortage, "resident_bytes", lambda: 150_000_000)
    monkeypatch.setattr(shortage, "peak_resident_bytes", lambda: 160_000_000)
    said = describe_shortage(RUN, plan_memory(RUN))
    assert "\n" not in said
    planned, measured, *ways = said.split("; ")
    assert planned.startswith("as planned the model needs ")
    assert "KV cache" in planned
    assert "weights" in planned
    assert measured == "measured: 150 MB resident, 160 MB at most, 100 MB available"
    assert ways[0].startswith("what would fit: ")
    assert len(ways) == 3


def test_where_nothing_can_be_measured_the_plan_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = replace(probe(providers=False), usable_memory=None)
    monkeypatch.setattr(shortage, "probe", lambda providers: machine)
    for name in ("resident_bytes", "peak_resident_bytes"):
        monkeypatch.setattr(shortage, name, lambda: None)
    assert "; measured: nothing; what would fit: " in describe_shortage(RUN, plan_memory(RUN))
