"""What constrained answers take: compiling a grammar, asking about a token, the mask of all tokens.

    python benchmarks/constraint.py MODEL

Each case walks through a text of its form token by token; the figures are of the second walk, but for the
first start of a grammar.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import busy_between, machine

from nybble import LLM, SamplingParams
from nybble.runtime.constraint import Constraints
from nybble.runtime.tokenizer import Tokenizer

RESULTS = Path(__file__).parent / "results" / "constraint.json"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 3, "maximum": 1000},
        "mail": {"type": "string", "format": "email"},
        "when": {"type": "string", "format": "date-time"},
        "tags": {"type": "array", "items": {"enum": [f"tag {i}" for i in range(100)]}},
        "more": {"type": "object", "additionalProperties": {"type": ["number", "null"]}},
    },
    "required": ["name", "age", "mail", "when", "tags", "more"],
    "additionalProperties": False,
}
DOCUMENT = {
    "name": "Ann Smith of Köln",
    "age": 44,
    "mail": "ann.smith@some-example.org",
    "when": "2024-03-04T12:33:00Z",
    "tags": ["tag 7", "tag 77"],
    "more": {"weight": 44.25, "height": None},
}
TEXT = json.dumps(DOCUMENT, ensure_ascii=False)
ARITHMETIC = """
start: sum
sum: term (("+" | "-") term)*
term: NUMBER | "(" sum ")"
NUMBER: /[0-9]+/
"""
CASES: dict[str, tuple[SamplingParams, str]] = {
    "any JSON object": (SamplingParams(json_object=True), TEXT),
    "JSON schema": (SamplingParams(json_schema=SCHEMA), TEXT),
    "regex": (SamplingParams(regex=r"[A-Z]{2}-[0-9]{4}(, [a-z]+)*"), "AB-1234, hello, there, wonderful"),
    "regex of words": (SamplingParams(regex=r"(\w+ ){3,20}\w+\."), "This is what there is of them."),
    "Lark grammar": (SamplingParams(grammar=ARITHMETIC), "12+(44-3+(2))-1+(99-98)"),
}


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def measure(
    constraints: Constraints, tokenizer: Tokenizer, params: SamplingParams, text: str
) -> dict[str, float]:
    """Seconds; medians over the text's tokens, and the longest of the masks."""
    compiled, _ = timed(lambda: constraints.start(params))
    tokens = tokenizer.encode(text)
    for walk in range(2):
        started, constraint = timed(lambda: constraints.start(params))
        asked, masked, moved = [], [], []
        for token in tokens:
            seconds, allowed = timed(lambda: constraint.allows(token))  # noqa: B023
            assert allowed, (walk, token)
            asked.append(seconds)
            masked.append(timed(constraint.allowed)[0])
            moved.append(timed(lambda: constraint.accept(token))[0])  # noqa: B023
        assert constraint.accepting
    return {
        "compile": compiled,
        "start": started,
        "one_token": statistics.median(asked),
        "mask": statistics.median(masked),
        "longest_mask": max(masked),
        "accept": statistics.median(moved),
    }


def main() -> None:
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    busy = busy_between()
    with LLM(arguments.model, max_model_len=512) as llm:
        tokenizer, vocab_size = llm.tokenizer, llm._loaded.executor.spec.vocab_size
        constraints = Constraints(tokenizer, vocab_size, llm._loaded.eos_token_ids)
        vocabulary, _ = timed(lambda: constraints.start(SamplingParams(regex="a")))
        cases = {
            name: measure(constraints, tokenizer, params, text) for name, (params, text) in CASES.items()
        }
    table = Table("µs", "compile", "start", "one token", "mask", "longest mask", "accept")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, figures in cases.items():
        table.add_row(name, *(f"{value * 1e6:.1f}" for value in figures.values()))
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    console.print(f"the vocabulary's trie, once: {vocabulary:.2f} s for {vocab_size} tokens")
    report = {
        "command": f"python benchmarks/constraint.py {arguments.model}",
        "machine": machine(),
        "busy_before": busy,
        "vocabulary_seconds": vocabulary,
        "vocab_size": vocab_size,
        "seconds": cases,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
