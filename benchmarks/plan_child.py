"""One run in a process of its own, for `benchmarks/plan.py`: what was planned and what was measured, as JSON.

Takes the case as JSON: `measure` ("memory" or "speed"), `model` (a path, an alias or a seeded model's name),
`tokenizer` (the folder with a seeded model's), `context`, `sequences`, `kv_dtype`, `threads`, and for memory
`cache` and `streamed`, for speed `lengths`. Little is imported, since that counts as memory.
"""

import json
import statistics
import sys
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from seeded_models import MODELS, TOKENIZER_TOKENS

import nybble.loading
from nybble import LLM, SamplingParams
from nybble.devices import (
    MachineLimits,
    MemoryPlan,
    Rates,
    ReadRate,
    RunSettings,
    load_profile,
    measure_limits,
    peak_resident_bytes,
    plan_memory,
    plan_within,
    smallest_plan,
)
from nybble.devices.memory_plan import TOKENIZER_PER_TOKEN, TOKENIZING_PER_TOKEN
from nybble.devices.prediction import Roofline
from nybble.runnable import Runnable, open_runnable
from nybble.runtime.statistics import StepStatistics

DEVICE = "laptop-cpu"
ANSWER = 64  # tokens
ROUNDS = 5
Case = dict[str, Any]


def main() -> None:
    case: Case = json.loads(sys.argv[1])

    def opened(path: str | Path, format: str, executor: Any) -> Runnable:
        if str(path) not in MODELS:
            return open_runnable(path, format, executor)
        return replace(MODELS[str(path)], tokenizer=Path(case["tokenizer"]))

    nybble.loading.open_runnable = opened
    print(json.dumps(memory(case, opened) if case["measure"] == "memory" else speed(case, opened)))


def open_llm(case: Case, **settings: Any) -> LLM:
    settings = {"memory_budget": "16GB"} | settings
    settings |= {"kv_dtype": case["kv_dtype"], "threads": case["threads"]}
    settings |= {"max_model_len": case["context"], "max_sequences": case["sequences"]}
    return LLM(case["model"], DEVICE, "cpu", **settings)


def planned(case: Case, opened: Any) -> tuple[RunSettings, MemoryPlan]:
    with closing(opened(case["model"], "auto", "cpu")) as model:
        run = RunSettings(
            model.spec, model.recipe, load_profile(DEVICE), context=case["context"], executor="cpu",
            sequences=case["sequences"], kv_dtype=case["kv_dtype"], threads=case["threads"], half=model.half,
            linear_bytes=model.linear_bytes,
        )  # fmt: skip
    return run, named(case, plan_memory(run))


def named(case: Case, plan: MemoryPlan) -> MemoryPlan:
    """The plan with the tokenizer that the model really has."""
    if case["model"] not in MODELS:
        return plan
    tokenizer, tokenizing = (size * TOKENIZER_TOKENS for size in (TOKENIZER_PER_TOKEN, TOKENIZING_PER_TOKEN))
    return replace(plan, tokenizer=tokenizer, tokenizing=tokenizing)


def prompts(llm: LLM, sequences: int, length: int) -> list[list[int]]:
    vocab = llm._loaded.executor.spec.vocab_size
    return np.random.default_rng(1).integers(3, vocab, (sequences, length)).tolist()


def memory(case: Case, opened: Any) -> dict[str, int]:
    """All that a run may do: every sequence at the end of its context at once, sampling, log-probabilities, a
    score; where `streamed`, in the least memory there is for it, or half-way from there to all of it. Bytes
    that were planned, and the peak."""
    (run, plan), budget = planned(case, opened), "16GB"
    if case["streamed"]:
        least, resident = smallest_plan(run).total, plan_memory(run).total
        size = (least + resident) // 2 if case["streamed"] == "half" else least
        plan, budget = named(case, plan_within(run, size)), str(size)
    with open_llm(case, cache=case["cache"], memory_budget=budget) as llm:
        asked = prompts(llm, plan.sequences, case["context"] - ANSWER)
        params = SamplingParams(max_tokens=ANSWER, ignore_eos=True, temperature=0.8, logprobs=2)
        llm.generate(asked, params)
        llm.score(asked[0])
    peak = peak_resident_bytes()
    assert peak is not None
    return {"planned": plan.total, "peak": peak}


def speed(case: Case, opened: Any) -> dict[str, Any]:
    """For one sequence and for all, at each length: seconds of a step of their answers, and of computing the
    prompts, as measured, and as predicted from what the machine was measured to do right before and after
    the answers' steps. The medians of several rounds of all of them."""
    run, plan = planned(case, opened)
    steps: list[StepStatistics] = []
    before: list[MachineLimits] = []

    def note(step: StepStatistics) -> None:
        if not (before or step.shape.prefill_tokens):
            before.append(measure_limits(case["threads"]))
        steps.append(step)

    found: dict[tuple[int, int], list[Case]] = {}
    # Prompts are computed in whole steps, before the first answer is at its end, and in each round.
    settings = {"speculation": "off", "target_token_ms": 1e5, "share_prefixes": False}
    with open_llm(case, on_step=note, **settings) as llm:
        for _ in range(ROUNDS):
            for count in sorted({1, case["sequences"]}):
                for length in case["lengths"]:
                    steps.clear()
                    before.clear()
                    params = SamplingParams(max_tokens=ANSWER, ignore_eos=True, temperature=0.0)
                    llm.generate(prompts(llm, count, length), params)
                    limits = between(before[0], measure_limits(case["threads"]))
                    roofline = Roofline(run, plan, Rates.measured(limits))
                    row = seconds_of(steps, count, length, roofline) | {"limits": asdict(limits)}
                    found.setdefault((count, length), []).append(row)
    rows = [
        {"sequences": count, "length": length, "decode": medians(each, "decode"), "rounds": each}
        | {"prefill": medians(each, "prefill")}
        for (count, length), each in found.items()
    ]
    return {"rows": rows}


def seconds_of(steps: list[StepStatistics], count: int, length: int, roofline: Roofline) -> Case:
    """Of one run of `count` sequences."""
    answers = [
        step.seconds / step.steps
        for step in steps
        if step.shape.decodes == count and not step.shape.prefill_tokens
    ]
    prefill = sum(step.seconds for step in steps if step.shape.prefill_tokens)
    decode = {
        "measured": statistics.median(answers),
        "predicted": roofline.decode(length + ANSWER // 2, count),
    }
    return {"decode": decode, "prefill": {"measured": prefill, "predicted": count * roofline.prompt(length)}}


def medians(rounds: list[Case], what: str) -> dict[str, float]:
    names = ("measured", "predicted")
    return {name: statistics.median(each[what][name] for each in rounds) for name in names}


def between(before: MachineLimits, after: MachineLimits) -> MachineLimits:
    return replace(
        before,
        small_read=mean(before.small_read, after.small_read),
        large_read=mean(before.large_read, after.large_read),
        integer_rate=(before.integer_rate + after.integer_rate) / 2,
    )


def mean(before: ReadRate, after: ReadRate) -> ReadRate:
    return replace(before, rate=(before.rate + after.rate) / 2)


if __name__ == "__main__":
    main()
