"""The large model in a process of its own, which `streaming.py` watches.

`python streaming_child.py PACKED_FILE THREADS STEPS STREAMED_LAYERS` streams so many layers and the head. It
prints what it found as JSON, and lives until its input ends.
"""

import json
import sys
from pathlib import Path

from large_model import DIGEST, SPEC
from streaming_runs import against_disk, open_executor

from nybble.devices.residency import ResidencyPlan
from nybble.runtime.streaming import streamed_bytes


def main(file: str, threads: str, steps: str, streamed: str) -> None:
    plan = ResidencyPlan.spread(SPEC.num_layers, int(streamed), streamed_head=True)
    source, executor = open_executor(Path(file), SPEC, DIGEST, plan, int(threads), 1)
    rounds = [against_disk(source, executor, plan, int(steps), passes=1) for _ in range(3)]
    print(json.dumps({"streamed_bytes": streamed_bytes(source, plan), "rounds": rounds}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
