"""Many requests in one process: Nybble's engine beside llama.cpp's parallel slots and OpenVINO GenAI's
continuous batching.

    python benchmarks/engine.py ARTIFACT                    # Nybble alone
    python benchmarks/engine.py ARTIFACT --llamacpp-python .venv-llamacpp/bin/python \\
        --openvino-python .venv-openvino/bin/python

ARTIFACT, the peers' Pythons and `--work` are those of `benchmarks/peers.py`; each peer runs in the 4-bit form
that is its fastest there. Every runtime is a process that stays loaded, and they take turns, another first in
each round. Prompts are cut from Python's language reference, new in each round, the same for each runtime.
Decoding is greedy and ends by length. Nybble runs as `AsyncLLM`, its peers in the loop of `peers/traffic.py`,
which adds requests between two steps. A token's time is when whoever asked could read it. No peer guesses
tokens ahead, and answers that may not end repeat themselves, which is easy to guess: so targets are Nybble's
without guesses. OpenVINO's cache is int8 by default, llama.cpp's f16, as Nybble's.

- arrivals: 32 requests that come at random, faster than they can be answered.
- prefix: 16 chats with one system prompt, each after the other; then, with another one, all at once.
- long: a prompt of 4,000 tokens that comes while 8 answers stream.
- speculation: `benchmarks/speculation.py` on some of its tasks. overhead: `benchmarks/step_overhead.py` with
  16 sequences.

After the first round peers take part in "arrivals" alone, and those that are not half as fast as the best one
not at all. What the table compares are medians over the rounds, and ratios of those.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import engine_cases as cases
import speculation
import step_overhead
from machine import machine
from peers import PEERS, Contender, Idleness, Worker, options, parsed, prepared

from nybble.loading import Loaded, load
from nybble.runtime.speculation import NgramProposer, Speculator

HERE = Path(__file__).parent
# By the option that names their Python: the worker, and the form of the model.
BATCHING = {"llamacpp": ("llama_cpp_slots.py", "Q4_0"), "openvino": ("openvino_batching.py", "INT4")}
CASES = ("arrivals", "prefix", "long", "speculation", "overhead")
# Tasks of `speculation.py`, and how many times faster they are to be.
SPECULATION = {"editing": 1.5, "summarizing": 1.5, "free text": 0.95, "free text, sampled": 0.95}
OVERHEAD = "16 sequences, greedy"


@dataclass(frozen=True)
class Target:
    """A figure of ours over another one, ours or the best peer's, and what it is to be."""

    name: str
    value: str
    over: str | None = None
    against_peers: bool = False
    least: float | None = None
    most: float | None = None

    def ratios(self, found: list[Contender]) -> dict[str, float]:
        """By each of our own contenders for which it was measured."""
        peers = [each for each in found if not cases.is_ours(each)]
        ratios = {own.name: self.ratio(own, peers) for own in found if cases.is_ours(own)}
        return {name: ratio for name, ratio in ratios.items() if ratio is not None}

    def ratio(self, own: Contender, peers: list[Contender]) -> float | None:
        if self.value not in own.values:
            return None
        value = median(own, self.value)
        if self.against_peers:
            others = [median(peer, self.value) for peer in peers if self.value in peer.values]
            best: Callable[[list[float]], float] = max if self.least is not None else min
            return value / best(others) if others else None
        return value / median(own, self.over) if self.over else value

    @property
    def bound(self) -> str:
        return f">= {self.least:g}" if self.least is not None else f"<= {self.most:g}"

    def met(self, ratio: float) -> bool:
        return (self.least is None or ratio >= self.least) and (self.most is None or ratio <= self.most)


ALONE, UNDISTURBED = "long: first token, alone", "long: between tokens, p99, undisturbed"
LONG, TARGET = "long", "long, with a target"
TARGETS = (
    Target("arrivals: tokens/s, to the best peer", "arrivals: tokens/s", against_peers=True, least=2),
    Target(
        "arrivals: p99 between tokens, to the best peer", "arrivals: between tokens, p99",
        against_peers=True, most=1,
    ),
    Target(
        "prefix: first token, hit to cold", "prefix: first token, hit", "prefix: first token, cold", most=0.1
    ),
    Target("prefix: pages, to unshared", "prefix: pages", "prefix: pages, unshared", most=0.4),
    Target(
        "prefix: tokens not computed, to hit tokens", "prefix: tokens not computed", "prefix: hit tokens",
        least=1, most=1,
    ),
    Target("long: p99 between tokens, to undisturbed", f"{LONG}: between tokens, p99", UNDISTURBED, most=3),
    Target("long: first token, to alone", f"{LONG}: first token", ALONE, most=2),
    Target(
        "long, with a target: first token, to alone", f"{TARGET}: first token", ALONE, most=2.5,
    ),
    *(
        Target(f"speculation: {task}, to plain", f"speculation: {task}", least=least)
        for task, least in SPECULATION.items()
    ),
    Target("overhead: share of a step", "overhead: share of a step", most=0.05),
)  # fmt: skip


def median(contender: Contender, name: str) -> float:
    return statistics.median(contender.values[name])


def contenders(arguments: argparse.Namespace, log: Path) -> list[Contender]:
    """Ours, as the targets are for it and in other settings, then the peers."""
    own = (sys.executable, "nybble_engine.py", str(arguments.artifact))
    plain = {"speculation": "off"}
    found = [
        Contender("Nybble", *own, plain),
        Contender("Nybble, int8 KV", *own, plain | {"kv_dtype": "int8"}, cases=("arrivals",)),
        Contender("Nybble, guessing", *own, cases=("arrivals",)),
    ]
    for option, (script, form) in BATCHING.items():
        python = getattr(arguments, f"{option}_python")
        if python is not None:
            forms = prepared(option, python, arguments.gguf, arguments.work, log)
            found.append(Contender(f"{PEERS[option][0]} {form}", python, script, forms[form]))
    return found


def measure_round(
    found: list[Contender], prose: cases.Prose, number: int, arguments: argparse.Namespace, log: Path,
    idle: Idleness,
) -> None:  # fmt: skip
    """The cases that peers have too."""
    turn, own = number % len(found), found[0]
    traffics = {"arrivals": cases.arrivals, "prefix": cases.shared_prefix, "long": cases.long_prompt}
    for name, measure in traffics.items():
        for contender in found[turn:] + found[:turn]:
            if name in arguments.cases and (contender.cases is None or name in contender.cases):
                with idle.watch(contender, found):
                    measure(contender, prose, number)
    if "long" in arguments.cases:
        undisturbed = own.values["long: between tokens, p50, undisturbed"][-1]
        other = replace(own, worker=Worker(own.python, own.script, log))
        try:
            with idle.watch(own, found):
                cases.with_target(other, prose, number, arguments.threads, undisturbed)
        finally:
            other.worker.close()


def drop_slow(found: list[Contender]) -> None:
    """After the first round peers take part in "arrivals" alone, and only those that can be the best."""
    peers = [peer for peer in found if not cases.is_ours(peer)]
    rates = [peer.values.get("arrivals: tokens/s", [0.0])[0] for peer in peers]
    for peer, rate in zip(peers, rates, strict=True):
        peer.cases = ("arrivals",) if rate > max(rates) / 2 else ()


def measure_own(own: Contender, loaded: Loaded, wanted: list[str]) -> None:
    """The cases that have their own benchmarks, in this process."""
    if "speculation" in wanted:
        once = argparse.Namespace(rounds=3, tokens=160)
        ways: dict[str, speculation.Speculate] = {
            "plain": lambda: None, "ngram": lambda: Speculator(NgramProposer())
        }  # fmt: skip
        for task in SPECULATION:
            text, temperature = speculation.TASKS[task]
            chat = [{"role": "user", "content": text}]
            ids = loaded.tokenizer.encode_chat(chat, add_generation_prompt=True)
            result = speculation.compare(loaded, [ids], temperature, once, ways)
            own.record(f"speculation: {task}", result["ngram"]["ratio"])
    if "overhead" in wanted:
        case = next(case for case in step_overhead.CASES if case.name == OVERHEAD)
        outside, inside = (statistics.median(each) for each in step_overhead.measure(loaded, case, 96))
        own.record("overhead: share of a step", outside / (outside + inside))
        own.record("overhead: outside the executor", 1e3 * outside)


def show(found: list[Contender]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 130)
    table = Table("times in ms", *(contender.name for contender in found))
    for name in dict.fromkeys(name for contender in found for name in contender.values):
        cells = [number(median(each, name)) if name in each.values else "-" for each in found]
        table.add_row(name, *cells)
    targets = Table("", "", "is", "target", "")
    for target in TARGETS:
        for own, ratio in target.ratios(found).items():
            verdict = "" if target.met(ratio) else "missed"
            targets.add_row(target.name, own, f"{ratio:.3f}", target.bound, verdict)
    for each in (table, targets):
        for column in each.columns[1:]:
            column.justify = "right"
        console.print(each)


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def report(
    found: list[Contender], arguments: argparse.Namespace, rounds: int, idle: Idleness
) -> dict[str, Any]:
    peers = " ".join(f"--{name}-python PYTHON" for name in BATCHING if getattr(arguments, f"{name}_python"))
    targets = []
    for target in TARGETS:
        for own, ratio in target.ratios(found).items():
            targets.append(
                {
                    "name": target.name,
                    "of": own,
                    "ratio": ratio,
                    "target": target.bound,
                    "met": target.met(ratio),
                }
            )
    return {
        "command": f"python benchmarks/engine.py {arguments.artifact.name} {peers}".rstrip(),
        "model": arguments.gguf.name,
        "machine": machine(),
        "threads": arguments.threads,
        "rounds": rounds,
        "largest_idle_share": idle.share,
        "mean_busy_between_runs": statistics.mean(idle.busy),
        "runtimes": {contender.name: contender.about for contender in found},
        "targets": targets,
        "median": {each.name: {name: median(each, name) for name in each.values} for each in found},
        "values": {each.name: each.values for each in found},
    }


def main() -> None:
    parser = options(__doc__, BATCHING, rounds=3, output="engine.json")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES, metavar="CASE")
    arguments = parsed(parser)
    log = arguments.work / "engine.log"
    found, idle = contenders(arguments, log), Idleness()
    with ExitStack() as opened:
        loaded = load(
            arguments.artifact, device="auto", executor="cpu", format="auto", providers=None,
            threads=arguments.threads, memory_budget=None, max_model_len=1200, max_batch_tokens=None,
            max_sequences=cases.SEQUENCES, kv_dtype=None, cache=True,
        )  # fmt: skip
        opened.callback(loaded.close)
        prose = cases.Prose(loaded.tokenizer)
        for contender in found:
            contender.worker = Worker(contender.python, contender.script, log)
            opened.callback(contender.worker.close)
            contender.worker.load(contender, arguments.threads, cases.CONTEXT, cases.SEQUENCES)
            contender.about = contender.worker.ask("about")
            cases.warm_up(contender, prose)
        for number in range(arguments.rounds):
            measure_round(found, prose, number, arguments, log, idle)
            with idle.watch(found[0], found):
                measure_own(found[0], loaded, arguments.cases)
            figures = report(found, arguments, number + 1, idle)
            arguments.output.write_text(json.dumps(figures, indent=1) + "\n")
            drop_slow(found)
            print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr, flush=True)
    show(found)


if __name__ == "__main__":
    main()
