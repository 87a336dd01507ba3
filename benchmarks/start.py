"""Where the time of a warm start goes: from the launch of Python to the first token of a prompt of 16.

    python benchmarks/start.py ARTIFACT --threads 2

Each round is a new process with files in the system's cache, packed weights and compiled Python kept from the
start before; the figures are medians. The share of each package in the imports is from one more run under
`-X importtime`, which slows them down. `benchmarks/peers.py` compares whole starts with other runtimes.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from machine import busy_between, compiled, machine

HERE = Path(__file__).parent
TARGET = 0.6  # seconds
LEAST_SHOWN = 0.001  # seconds of a package's imports


def run(artifact: Path, threads: int, *options: str) -> tuple[dict[str, float], str]:
    """Seconds by stage, and what the process wrote on standard error."""
    launched = time.monotonic()
    command = [
        sys.executable,
        *options,
        str(HERE / "start_child.py"),
        str(artifact),
        str(threads),
        str(launched),
    ]
    ended = subprocess.run(command, env=compiled(), capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(ended.stderr)
    return json.loads(ended.stdout), ended.stderr


def import_times(log: str) -> dict[str, float]:
    """Seconds that importing each package's own modules took, most first."""
    found: Counter[str] = Counter()
    for microseconds, module in re.findall(r"^import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)", log, re.MULTILINE):
        name = module.partition(".")[0].lstrip("_")
        found["standard library" if name in STANDARD else name] += int(microseconds)
    return {name: total / 1e6 for name, total in found.most_common()}


STANDARD = {name.lstrip("_") for name in sys.stdlib_module_names}


def main() -> None:
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "start.json")
    arguments = parser.parse_args()
    run(arguments.artifact, arguments.threads)  # packs, compiles, reads the files
    busy = busy_between()
    rounds = [run(arguments.artifact, arguments.threads)[0] for _ in range(arguments.rounds)]
    imports = import_times(run(arguments.artifact, arguments.threads, "-X", "importtime")[1])
    medians = {stage: statistics.median(times[stage] for times in rounds) for stage in rounds[0]}
    table = Table("", "ms", "target")
    for column in table.columns[1:]:
        column.justify = "right"
    for stage, seconds in medians.items():
        table.add_row(stage, f"{seconds * 1e3:.0f}", f"{TARGET * 1e3:.0f}" if stage == "total" else "")
        if stage == "imports":
            for name in [name for name, taken in imports.items() if taken > LEAST_SHOWN]:
                table.add_row(f"  {name}", f"{imports[name] * 1e3:.0f}", "")
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    report = {
        "command": f"python benchmarks/start.py {arguments.artifact.name} --threads {arguments.threads}",
        "machine": machine(),
        "threads": arguments.threads,
        "busy_before": busy,
        "target_seconds": TARGET,
        "median_seconds": medians,
        "import_seconds": imports,
        "rounds": rounds,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
