"""What speculative decoding gives, and what it costs where it gives nothing.

    python benchmarks/speculation.py smollm2 --threads 2

First a step's time by the tokens it checks, as a multiple of a plain one. Then answers with prompt lookup
beside the same without, in turn: tokens a second after the first token. Both give the same tokens, which is
checked. `--draft MODEL` adds a draft model.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from machine import busy_between, machine

from nybble import SamplingParams
from nybble.loading import Loaded, load
from nybble.runtime.batch import Batch
from nybble.runtime.engine import Engine
from nybble.runtime.sequence import Request
from nybble.runtime.speculation import NgramProposer, Speculator

RESULTS = Path(__file__).parent / "results" / "speculation.json"
RIVER = (
    "The river Thames rises at Thames Head in Gloucestershire, and flows into the North Sea near Tilbury, "
    "Essex and Gravesend, Kent, via the Thames Estuary. From the west, it flows through Oxford, where it is "
    "sometimes called the Isis, Reading, Henley-on-Thames and Windsor. The Thames also drains the whole of "
    "Greater London. The lower reaches of the river are called the Tideway, derived from its long tidal "
    "reach up to Teddington Lock. Its tidal section includes most of its London stretch and has a rise and "
    "fall of 23 feet. Running through some of the drier parts of mainland Britain and heavily abstracted "
    "for drinking water, the Thames' discharge is low considering its length and breadth: the Severn has a "
    "discharge almost twice as large on average despite having a smaller drainage basin."
)
CODE = """def total(items):
    result = 0
    for item in items:
        result = result + item.price
    return result


def average(items):
    count = 0
    for item in items:
        count = count + 1
    return total(items) / count
"""
# (what is asked, temperature)
TASKS: dict[str, tuple[str, float]] = {
    "editing": (f'Repeat this text, but write "Themse" instead of "Thames":\n\n{RIVER}', 0.0),
    "copying": (f"Repeat the following text word for word:\n\n{RIVER}", 0.0),
    "summarizing": (f"Summarize this text, using its own words:\n\n{RIVER}", 0.0),
    "editing code": (f"Rewrite this code with type annotations:\n\n```python\n{CODE}```", 0.0),
    "free text": ("Write a story about a fox who learns to sail.", 0.0),
    "free text, sampled": ("Write a story about a fox who learns to sail.", 0.8),
    "question": ("Why is the sky blue in the day and red in the evening?", 0.0),
}
TOGETHER = {"8 editing": "editing", "8 free text, sampled": "free text, sampled"}
CHECKED = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
Speculate = Callable[[], Speculator | None]


def check_batch(loaded: Loaded, sequences: int, past: int, tokens: int) -> Batch:
    """A step of so many sequences with as many tokens each, all rows' logits wanted, after `past` tokens."""
    layout = loaded.executor.kv_layout
    width = -(-(past + tokens) // layout.page_size)
    table = np.arange(sequences * width, dtype=np.int32).reshape(1, sequences, width)
    positions = np.arange(past, past + tokens)
    slots = table[0][:, positions // layout.page_size] * layout.page_size + positions % layout.page_size
    return Batch(
        token_ids=np.full(sequences * tokens, 100, np.int32),
        cu_seqlens=np.arange(0, sequences * tokens + 1, tokens, dtype=np.int32),
        past_lens=np.full(sequences, past, np.int32),
        block_table=table,
        slot_mapping=slots.reshape(1, -1).astype(np.int32),
        logit_rows=np.arange(sequences * tokens, dtype=np.int32),
    )


def step_costs(loaded: Loaded, sequences: int, past: int, repeats: int = 9) -> dict[int, float]:
    """Seconds of a step by how many tokens of each sequence it checks."""
    found = {}
    for tokens in CHECKED:
        batch, times = check_batch(loaded, sequences, past, tokens), []
        loaded.executor.step(batch)
        for _ in range(repeats):
            start = time.perf_counter()
            loaded.executor.step(batch)
            times.append(time.perf_counter() - start)
        found[tokens] = statistics.median(times)
    return found


def answer(
    loaded: Loaded, prompts: Sequence[Sequence[int]], temperature: float, tokens: int,
    speculator: Speculator | None,
) -> dict[str, Any]:  # fmt: skip
    """Answers some prompts at once; tokens a second are those after each one's first."""
    engine = Engine(
        loaded.executor,
        loaded.tokenizer,
        max_model_len=loaded.max_model_len,
        max_batch_tokens=loaded.max_batch_tokens,
        max_sequences=loaded.max_sequences,
        eos_token_ids=loaded.eos_token_ids,
        speculator=speculator,
    )
    sequences = [
        engine.add(
            Request(str(i), tuple(ids), SamplingParams(temperature=temperature, seed=i, max_tokens=tokens))
        )
        for i, ids in enumerate(prompts)
    ]
    while any(sequence.num_output == 0 for sequence in sequences):
        engine.step()
    before, steps_before = sum(s.num_output for s in sequences), engine.statistics.steps
    start = time.perf_counter()
    while engine.has_work:
        engine.step()
    seconds = time.perf_counter() - start
    if speculator is not None:
        for sequence in sequences:
            speculator.forget(sequence)
    made = sum(s.num_output for s in sequences) - before
    return {
        "tokens": made,
        "steps": engine.statistics.steps - steps_before,
        "tokens_per_second": made / seconds,
        "ids": [list(s.output().token_ids) for s in sequences],
    }


def compare(
    loaded: Loaded, ids: Sequence[Sequence[int]], temperature: float, arguments: argparse.Namespace,
    contenders: dict[str, Speculate],
) -> dict[str, Any]:  # fmt: skip
    """Each contender's runs, in turn; ratios are medians over the rounds of the ratio to plain decoding."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
    for _ in range(arguments.rounds):
        for name, make in contenders.items():
            runs[name].append(answer(loaded, ids, temperature, arguments.tokens, make()))
    plain = runs["plain"]
    result: dict[str, Any] = {"tokens": plain[0]["tokens"]}
    for name, each in runs.items():
        assert all(run["ids"] == plain[0]["ids"] for run in each), f"{name} changed a token"
        rates = [run["tokens_per_second"] for run in each]
        ratios = [rate / other["tokens_per_second"] for rate, other in zip(rates, plain, strict=True)]
        result[name] = {
            "tokens_per_second": statistics.median(rates),
            "ratio": statistics.median(ratios),
            "tokens_per_step": each[-1]["tokens"] / each[-1]["steps"],
        }
    return result


def main() -> None:
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=160, help="at most, of an answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--draft", help="a draft model's path")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    loaded = load(
        arguments.model, device="auto", executor="cpu", format="auto", providers=None,
        threads=arguments.threads, memory_budget=None, max_model_len=1200, max_batch_tokens=None,
        max_sequences=8, kv_dtype=None, cache=True, speculation=arguments.draft or "off",
    )  # fmt: skip
    busy = busy_between()
    console = Console(width=None if sys.stdout.isatty() else 120)
    costs = {
        f"{sequences} x {past}": step_costs(loaded, sequences, past)
        for sequences, past in ((1, 200), (1, 1000), (4, 200), (8, 200))
    }
    table = Table("sequences x context", "1 token, ms", *(f"{n}" for n in CHECKED[1:]))
    for name, seconds in costs.items():
        ratios = [f"{seconds[n] / seconds[1]:.2f}" for n in CHECKED[1:]]
        table.add_row(name, f"{seconds[1] * 1e3:.2f}", *ratios)
    console.print("A step that checks so many tokens of each sequence, as a multiple of one:", table)

    # One for all tasks, as in an engine that has run for a while.
    ngram = Speculator(NgramProposer())
    contenders: dict[str, Speculate] = {"plain": lambda: None, "ngram": lambda: ngram}
    if arguments.draft:
        contenders["draft"] = lambda: loaded.speculator
    prompts = {
        name: loaded.tokenizer.encode_chat([{"role": "user", "content": text}], add_generation_prompt=True)
        for name, (text, _) in TASKS.items()
    }
    tasks = {
        name: compare(loaded, [ids], TASKS[name][1], arguments, contenders) for name, ids in prompts.items()
    }
    for name, task in TOGETHER.items():
        tasks[name] = compare(loaded, [prompts[task]] * 8, TASKS[task][1], arguments, contenders)
    table = Table(
        "", "tokens", "plain tokens/s", *(f"{name}, times" for name in contenders if name != "plain")
    )
    for name, result in tasks.items():
        shown = [f"{result[each]['ratio']:.2f}" for each in contenders if each != "plain"]
        table.add_row(name, str(result["tokens"]), f"{result['plain']['tokens_per_second']:.0f}", *shown)
    console.print(table)
    loaded.close()
    report = {
        "command": f"python benchmarks/speculation.py {Path(arguments.model).name}"
        f" --threads {arguments.threads}",
        "machine": machine(),
        "threads": arguments.threads,
        "busy_before": busy,
        "step_seconds": costs,
        "tasks": tasks,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
