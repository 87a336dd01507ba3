"""How fast answers are while something else wants the processors, on Nybble and on the runtimes that are
installed.

    python benchmarks/neighbours.py ARTIFACT --llamacpp-python .venv-llamacpp/bin/python ...

ARTIFACT and the options are those of `benchmarks/peers.py`. Each runtime decodes one sequence on two threads,
on a machine of as many processors: alone, beside a process that keeps one processor busy, and beside a second
process that does the same as itself, whose tokens count too. In turn, medians over the rounds, on the same
random token ids.
"""

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from machine import machine
from peers import PEERS, Contender, Run, Worker, contenders, options, parsed, prompts_of

NEW_TOKENS, CONTEXT = 97, 512
CASES = ("alone", "beside a busy process", "two at once")


@contextmanager
def busy_process() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.1)
        yield
    finally:
        process.kill()
        process.wait()


def decode(worker: Worker, seed: str) -> float:
    """Seconds of the tokens after the first."""
    times = worker.ask("run", prompts=prompts_of(Run(1, 16, ""), seed), new_tokens=NEW_TOKENS)
    return float(times["total"] - times["first"])


def together(workers: list[Worker], seed: str) -> list[float]:
    seconds = [0.0] * len(workers)

    def one(i: int) -> None:
        seconds[i] = decode(workers[i], f"{seed} {i}")

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(workers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seconds


def measure(contender: Contender, workers: list[Worker], seed: str) -> None:
    """Tokens per second of each case."""
    steps = NEW_TOKENS - 1
    contender.record("alone", steps / decode(workers[0], f"{seed} alone"))
    with busy_process():
        contender.record("beside a busy process", steps / decode(workers[0], f"{seed} beside"))
    both = together(workers, seed)
    contender.record("two at once", sum(steps / seconds for seconds in both))


def show(found: list[Contender]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("tokens/s", *CASES, "share left beside a busy process")
    for column in table.columns[1:]:
        column.justify = "right"
    for contender in found:
        medians = {case: statistics.median(contender.values[case]) for case in CASES}
        share = medians["beside a busy process"] / medians["alone"]
        table.add_row(contender.name, *(f"{medians[case]:,.0f}" for case in CASES), f"{share:.0%}")
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def report(found: list[Contender], arguments: argparse.Namespace, rounds: int) -> dict[str, Any]:
    return {
        "command": f"python benchmarks/neighbours.py {arguments.artifact.name}",
        "machine": machine(),
        "threads": arguments.threads,
        "rounds": rounds,
        "runtimes": {contender.name: contender.about for contender in found},
        "median": {c.name: {case: statistics.median(c.values[case]) for case in CASES} for c in found},
        "values": {c.name: c.values for c in found},
    }


def main() -> None:
    arguments = parsed(options(__doc__, PEERS, rounds=7, output="neighbours.json"))
    log = arguments.work / "peers.log"
    found = contenders(arguments, log)
    for number in range(arguments.rounds):
        turn = number % len(found)
        for contender in found[turn:] + found[:turn]:
            workers = [Worker(contender.python, contender.script, log) for _ in range(2)]
            for worker in workers:
                worker.load(contender, arguments.threads, CONTEXT, 1)
                decode(worker, "warm")
            contender.about = workers[0].ask("about")
            measure(contender, workers, f"{number}")
            for worker in workers:
                worker.close()
        figures = report(found, arguments, number + 1)
        arguments.output.write_text(json.dumps(figures, indent=1) + "\n")
        print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr, flush=True)
    show(found)


if __name__ == "__main__":
    main()
