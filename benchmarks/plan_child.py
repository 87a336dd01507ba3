"""One run in a process of its own, for `benchmarks/plan.py`: what was planned and what was measured, as JSON.

Takes the case as JSON: `model` (a path, an alias or a seeded model's name), `tokenizer` (the folder with a
seeded model's), `context`, `sequences`, `kv_dtype`, `threads`, `cache`. Little is imported, since that counts.
"""

import json
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from seeded_models import MODELS, TOKENIZER_TOKENS

import nybble.loading
from nybble import LLM, SamplingParams
from nybble.devices import RunSettings, load_profile, peak_resident_bytes, plan_memory
from nybble.devices.memory_plan import TOKENIZER_PER_TOKEN
from nybble.runnable import Runnable, open_runnable

DEVICE = "laptop-cpu"
ANSWER = 64  # tokens


def main() -> None:
    case = json.loads(sys.argv[1])

    def opened(path: str | Path, format: str, executor: Any) -> Runnable:
        model = MODELS.get(str(path))
        return (
            replace(model, tokenizer=Path(case["tokenizer"]))
            if model
            else open_runnable(path, format, executor)
        )

    nybble.loading.open_runnable = opened
    context, sequences = case["context"], case["sequences"]
    settings = {"kv_dtype": case["kv_dtype"], "threads": case["threads"]}
    limits = {"max_model_len": context, "max_sequences": sequences}
    with LLM(
        case["model"], DEVICE, "cpu", cache=case["cache"], memory_budget="16GB", **limits, **settings
    ) as llm:
        # All that a run may do: every sequence at the end of its context at once, sampling, log-probabilities, a
        # score.
        vocab = llm._loaded.executor.spec.vocab_size
        prompts = np.random.default_rng(1).integers(3, vocab, (sequences, context - ANSWER)).tolist()
        params = SamplingParams(max_tokens=ANSWER, ignore_eos=True, temperature=0.8, logprobs=2)
        llm.generate(prompts, params)
        llm.score(prompts[0])
    peak = peak_resident_bytes()
    with closing(opened(case["model"], "auto", "cpu")) as model:
        plan = plan_memory(
            RunSettings(
                model.spec, model.recipe, load_profile(DEVICE), context=context, sequences=sequences,
                executor="cpu", half=model.half, linear_bytes=model.linear_bytes, **settings,
            )
        )  # fmt: skip
    if case["model"] in MODELS:
        plan = replace(plan, tokenizer=TOKENIZER_PER_TOKEN * TOKENIZER_TOKENS)
    print(json.dumps({"planned": plan.total, "peak": peak}))


if __name__ == "__main__":
    main()
