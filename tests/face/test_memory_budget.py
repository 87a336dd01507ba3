"""`memory_budget`: kept by every run from the smallest plan to the resident one, with the same tokens."""

import json
import logging
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import random_requests as child
from limited_memory import limited_memory
from memory_trace import trace
from planned import INT4, LAPTOP, SMOLLM2
from random_requests import REQUESTS, THREADS, random_requests

from nybble import LLM, quantize
from nybble.devices import (
    KvDtype,
    RunSettings,
    load_profile,
    plan_memory,
    share_pages,
    smallest_plan,
)
from nybble.devices.budget import plan_within
from nybble.errors import DoesNotFitError, OutputError
from nybble.loading import _plan
from nybble.runnable import open_runnable

CONTEXT: int = 448
KV: KvDtype = "f32"  # so that the cache is most of what so small a model takes
PAGES = CONTEXT // 16


@pytest.fixture(scope="module")
def artifact(make_tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six layers, so that some can be streamed."""
    out = tmp_path_factory.mktemp("budget") / "int4"
    folder = make_tiny_model("llama", num_hidden_layers=6, intermediate_size=256)
    quantize(folder, out, method="rtn", group_size=32, formats=["gptq"])
    return out


@pytest.fixture(scope="module")
def mixture(make_tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Most of its weights are experts', with one that all tokens share."""
    out = tmp_path_factory.mktemp("budget") / "experts"
    folder = make_tiny_model(
        "qwen2_moe",
        num_hidden_layers=4,
        hidden_size=128,
        num_experts=24,
        num_experts_per_tok=3,
        moe_intermediate_size=1024,
        shared_expert_intermediate_size=128,
    )
    quantize(folder, out, method="rtn", group_size=32, formats=["gptq"])
    return out


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def run_settings(path: Path | str, context: int = CONTEXT, kv_dtype: KvDtype = KV) -> RunSettings:
    with closing(open_runnable(path, "auto", "cpu")) as model:
        return RunSettings(
            model.spec, model.recipe, load_profile("laptop-cpu"), context=context, sequences=REQUESTS,
            kv_dtype=kv_dtype, half=model.half, threads=THREADS, executor="cpu",
            linear_bytes=model.linear_bytes,
        )  # fmt: skip


def answers(path: Path, budget: int | None, **settings: Any) -> list[list[int]]:
    limits = {"max_model_len": CONTEXT, "max_sequences": REQUESTS, "threads": THREADS}
    with LLM(path, "laptop-cpu", "cpu", memory_budget=budget, **limits, **settings) as llm:
        outputs = llm.generate(*random_requests(512, CONTEXT))
    return [list(output.token_ids) for output in outputs]


def budgets(run: RunSettings, count: int) -> list[int]:
    """From the planner's minimum to what holds all of it."""
    return np.linspace(smallest_plan(run).total, plan_memory(run).total, count).astype(int).tolist()


def test_the_tokens_are_the_same_within_every_budget(artifact: Path) -> None:
    expected = answers(artifact, None, kv_dtype=KV)
    run = run_settings(artifact)
    plans = [share_pages(plan_within(run, each), run, REQUESTS) for each in budgets(run, 5)]
    assert any(plan.residency.streams for plan in plans)
    assert any(plan.sequences * PAGES > plan.num_pages and not plan.residency.streams for plan in plans)
    for budget in budgets(run, 5):
        assert answers(artifact, budget, kv_dtype=KV) == expected, budget


def test_a_mixture_gives_the_same_tokens_with_its_experts_streamed(mixture: Path) -> None:
    expected = answers(mixture, None, kv_dtype=KV)
    run = run_settings(mixture)
    plans = [plan_within(run, each).residency for each in budgets(run, 7)]
    slots = {plan.expert_slots for plan in plans}
    assert len(slots) >= 4
    assert 3 in slots  # as many as a token has experts
    assert any(plan.expert_slots and not plan.streamed_layers for plan in plans)
    for budget in budgets(run, 7):
        assert answers(mixture, budget, kv_dtype=KV) == expected, budget


def test_streamed_weights_come_from_a_temporary_file_where_none_is_kept(
    artifact: Path, tmp_path: Path
) -> None:
    expected, (least, *_) = answers(artifact, None, kv_dtype=KV), budgets(run_settings(artifact), 2)
    (tmp_path / "scratch").mkdir()
    settings: dict[str, Any] = {"kv_dtype": KV, "cache": False}
    assert answers(artifact, least, scratch_folder=tmp_path / "scratch", **settings) == expected
    assert list((tmp_path / "scratch").iterdir()) == []
    with pytest.raises(OutputError, match="not there: packed weights cannot be written: No such file"):
        answers(artifact, least, scratch_folder=tmp_path / "not there", **settings)


def test_what_is_given_up_is_one_line_and_a_warning_where_answers_change(caplog: Any) -> None:
    run = RunSettings(SMOLLM2, INT4, LAPTOP, context=1024, kv_dtype="f16", executor="cpu")
    least = smallest_plan(run)
    smaller = smallest_plan(replace(run, kv_dtype="int8"))
    with caplog.at_level(logging.INFO, "nybble"):
        assert _plan(replace(run, budget=least.total), 16, "model", None).kv_dtype == "f16"
        assert _plan(replace(run, budget=smaller.total), 16, "model", None).kv_dtype == "int8"
        with pytest.raises(DoesNotFitError, match="in f16"):
            _plan(replace(run, budget=smaller.total), 16, "model", "f16")
    first, second = caplog.records
    assert (first.levelno, second.levelno) == (logging.INFO, logging.WARNING)
    assert first.message.startswith("model: within ")
    assert "30 of 30 layers are streamed; the head is streamed" in first.message
    assert second.message.endswith("the KV cache is int8, not f16")


def test_too_small_a_budget_is_refused_before_anything_is_opened(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(*args: Any) -> None:
        raise AssertionError("the weights or the tokenizer were opened")

    monkeypatch.setattr("nybble.runnable.RunnableArtifact.packed", opened)
    monkeypatch.setattr("nybble.loading.Tokenizer", opened)
    with pytest.raises(DoesNotFitError, match=r"needs at least \d+.* MB, the memory budget is 20.0 MB: "):
        answers(artifact, 20_000_000)


def test_more_sequences_run_than_have_pages_for_whole_contexts() -> None:
    run = RunSettings(SMOLLM2, INT4, LAPTOP, context=1024, kv_dtype="f16", executor="cpu")
    alone = plan_memory(replace(run, sequences=2))
    pages = 16  # what the other sequences take besides their own, and some more
    budget = alone.total + pages * alone.kv_page
    plan = plan_within(run, budget, max_sequences=REQUESTS)
    shared = share_pages(plan, run, REQUESTS)
    assert plan.sequences == 2
    assert shared.sequences == REQUESTS
    assert plan.num_pages < shared.num_pages < plan.num_pages + pages
    assert shared.total <= budget
    assert shared.concessions == ("16 sequences share KV pages for 2 whole contexts",)
    assert share_pages(alone, run, 2) == alone


def answers_of_child(path: str, context: int, budget: int, home: Path) -> tuple[list[list[int]], int]:
    """The tokens, and the peak of its resident memory; in a control group of the budget and a tenth, where
    one can be made."""
    environment = os.environ | {"XDG_CACHE_HOME": str(home), "TMPDIR": str(home)}
    environment["PYTHONPATH"] = os.path.dirname(child.__file__)
    with limited_memory(budget + budget // 10 if budget else 1 << 40) as prefix:
        command = [sys.executable, child.__file__, path, str(context), str(budget)]
        found = trace([*(prefix or ()), *command], environment)
    return json.loads(found.marks[-1][1]), found.peak()


def check_budgets(path: str, context: int, count: int, home: Path) -> None:
    expected, _ = answers_of_child(path, context, 0, home)
    run = run_settings(path, context, "f16")
    for budget in budgets(run, count):
        found, peak = answers_of_child(path, context, budget, home)
        assert found == expected, budget
        assert peak <= 1.1 * budget


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_a_process_keeps_to_its_budget(artifact: Path, tmp_path: Path) -> None:
    check_budgets(str(artifact), CONTEXT, 2, tmp_path)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_a_process_with_streamed_experts_keeps_to_its_budget(mixture: Path, tmp_path: Path) -> None:
    check_budgets(str(mixture), CONTEXT, 3, tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("model", ["artifact", "gguf"])
def test_smollm2_keeps_to_its_budget(request: Any, tmp_path: Path, model: str) -> None:
    path = "smollm2"
    if model == "artifact":
        path = str(shutil.copytree(request.getfixturevalue("smollm2").path, tmp_path / "copy"))
    check_budgets(path, 128, 5, tmp_path)
