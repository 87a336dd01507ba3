"""Plans beside what was measured: peak memory, and seconds of steps, each run in a process of its own.

    python benchmarks/plan.py --artifact ARTIFACT [--only memory|speed] [--model NAME ...]

SmolLM2 as ARTIFACT and as its GGUF file, and models of five shapes with seeded random weights, up to 1.5
billion of them, one a mixture of experts, over contexts, sequences and cache types. A plan should be within
5 % or 15 MB of the peak, whichever is more, and never under it by more; the predicted speed of decode steps
within 20 % of the measured one, predicted from what this machine is measured to do around them.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import busy_between, machine
from seeded_models import write_tokenizer

HERE = Path(__file__).parent
SHARE, BYTES, SPEED = 0.05, 15_000_000, 0.2

# Model, context, sequences, cache type, whether packed weights are kept, whether all are streamed, or half.
MEMORY = [
    ("artifact", 1024, 1, "f16", True, False),
    ("artifact", 1024, 1, "f16", False, False),
    ("artifact", 2048, 4, "int8", True, False),
    ("artifact", 3000, 1, "f32", True, False),
    ("artifact", 1024, 1, "f16", True, True),
    ("smollm2", 1024, 1, "f16", True, False),
    ("smollm2", 512, 1, "f16", True, True),
    ("seeded-360m", 1024, 2, "f16", True, False),
    ("seeded-untied", 512, 1, "f16", True, False),
    ("seeded-untied", 512, 2, "int8", True, True),
    ("seeded-0.5b", 512, 2, "f16", True, False),
    ("seeded-0.5b", 256, 1, "f32", True, False),
    ("seeded-1.5b", 256, 1, "f16", True, False),
    ("seeded-1.5b", 512, 1, "int8", True, False),
    ("seeded-1.5b", 512, 1, "f16", True, True),
    ("seeded-experts", 512, 1, "f16", True, False),
    ("seeded-experts", 512, 1, "f16", True, "half"),
    ("seeded-experts", 512, 1, "f16", True, True),
]
# Model, sequences, cache type, lengths.
SPEEDS = [
    ("artifact", 4, "f16", [32, 500, 2000]),
    ("artifact", 4, "int8", [32, 500, 2000]),
    ("smollm2", 4, "f16", [32, 500]),
    ("seeded-360m", 4, "f16", [32, 1000]),
    ("seeded-untied", 4, "f16", [32, 500]),
    ("seeded-0.5b", 4, "f16", [32, 500]),
    ("seeded-1.5b", 1, "f16", [32, 500]),
]


def child(case: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, str(HERE / "plan_child.py"), json.dumps(case)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
    if ended.returncode:
        raise SystemExit(ended.stderr)
    return dict(json.loads(ended.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--artifact", type=Path, required=True)
    parser.add_argument("--only", choices=["memory", "speed"])
    parser.add_argument("--model", action="append", help="Of the models above; repeatable [default: all].")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "plan.json")
    arguments = parser.parse_args()
    report: dict[str, Any] = {}
    if arguments.output.exists():  # what is not measured again stays
        report = json.loads(arguments.output.read_text())
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        shared = {"threads": arguments.threads, "tokenizer": folder}
        names = {"artifact": str(arguments.artifact)}
        if arguments.only != "speed":
            report["memory"] = memory(names, shared, arguments.model, report.get("memory", []))
        if arguments.only != "memory":
            report["speed"] = speed(names, shared, arguments.model, report.get("speed", []))
    report |= {
        "command": f"python benchmarks/plan.py --artifact {arguments.artifact.name}",
        "machine": machine(),
        "threads": arguments.threads,
    }
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")


def memory(
    names: dict[str, str], shared: dict[str, Any], only: list[str] | None, before: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    from rich.console import Console
    from rich.table import Table

    rows = [row for row in before if only and row["model"] not in only]
    for model, context, sequences, kv_dtype, cache, streamed in MEMORY:
        if only and model not in only:
            continue
        case = {"context": context, "sequences": sequences, "kv_dtype": kv_dtype, "cache": cache}
        case["streamed"] = streamed
        asked = {"measure": "memory", "model": names.get(model, model)}
        rows.append({"model": model, **case, **child(asked | case | shared)})
    table = Table("model", "context", "sequences", "cache", "weights", "planned", "measured", "more", "")
    for row in rows:
        over = row["planned"] - row["peak"]
        table.add_row(
            row["model"],
            str(row["context"]),
            str(row["sequences"]),
            row["kv_dtype"],
            _weights(row),
            f"{row['planned'] / 1e6:.0f} MB",
            f"{row['peak'] / 1e6:.0f} MB",
            f"{over / row['peak']:+.1%}",
            "" if abs(over) <= max(SHARE * row["peak"], BYTES) else "missed",
        )
    Console(width=120).print(table)
    return rows


def _weights(row: dict[str, Any]) -> str:
    if row["streamed"]:
        return "half streamed" if row["streamed"] == "half" else "streamed"
    return "from a file" if row["cache"] else "packed"


def speed(
    names: dict[str, str], shared: dict[str, Any], only: list[str] | None, before: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    from rich.console import Console
    from rich.table import Table

    found = [each for each in before if only and each["model"] not in only]
    for model, sequences, kv_dtype, lengths in SPEEDS:
        if only and model not in only:
            continue
        case = {"sequences": sequences, "kv_dtype": kv_dtype, "lengths": lengths}
        case["context"] = lengths[-1] + 80
        asked = {"measure": "speed", "model": names.get(model, model)}
        busy = busy_between()
        found.append({"model": model, "busy_before": busy, **case, **child(asked | case | shared)})
    table = Table(
        "model", "cache", "sequences", "length", "decode, predicted", "measured", "", "prompt", "", ""
    )
    for each in found:
        for row in each["rows"]:
            decode, prefill = row["decode"], row["prefill"]
            off, prompt = (_off(row, what) for what in ("decode", "prefill"))
            table.add_row(
                each["model"],
                each["kv_dtype"],
                str(row["sequences"]),
                str(row["length"]),
                f"{1e3 * decode['predicted']:.1f} ms",
                f"{1e3 * decode['measured']:.1f} ms",
                f"{off:+.0%}" + ("" if abs(off) <= SPEED else " missed"),
                f"{prefill['predicted']:.2f} s",
                f"{prefill['measured']:.2f} s",
                f"{prompt:+.0%}",
            )
    Console(width=120).print(table)
    return found


def _off(row: dict[str, Any], what: str) -> float:
    """How far the predicted speed is from the measured one, the median over the rounds."""
    return statistics.median(each[what]["measured"] / each[what]["predicted"] - 1 for each in row["rounds"])


if __name__ == "__main__":
    main()
