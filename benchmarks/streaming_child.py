"""The large model in a process of its own, which `streaming.py` watches.

`python streaming_child.py PACKED_FILE THREADS STEPS STREAMED_LAYERS` streams so many layers and the head. It
prints what it found as JSON, and lives until its input ends.
"""

import json
import sys
from pathlib import Path

from large_model import DIGEST, SPEC
from streaming_runs import open_executor, read_rate, step_seconds

from nybble.devices.residency import ResidencyPlan
from nybble.runtime.streaming import streamed_bytes


def main(file: str, threads: str, steps: str, streamed: str) -> None:
    plan = ResidencyPlan.spread(SPEC.num_layers, int(streamed), streamed_head=True)
    source, executor = open_executor(Path(file), SPEC, DIGEST, plan, int(threads), 1)
    bytes_of_step = streamed_bytes(source, plan)
    rounds = []
    for _ in range(3):
        rate = read_rate(source, plan, 1)
        rounds.append((bytes_of_step / rate, step_seconds(executor, 1, int(steps))))
    print(json.dumps({"streamed_bytes": bytes_of_step, "rounds": rounds}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
