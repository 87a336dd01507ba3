"""A model in a process of its own, which `streaming.py` watches: the large one, or an artifact's.

`python streaming_child.py PACKED_FILE THREADS STEPS STREAMED_LAYERS BUFFERS [ARTIFACT]` streams so many
layers, and of the large one the head. It prints what it found as JSON, and lives until its input ends.
"""

import json
import sys
from pathlib import Path

from large_model import DIGEST, SPEC
from streaming_runs import against_disk, open_executor

from nybble.devices.residency import ResidencyPlan
from nybble.export.artifact import open_artifact
from nybble.runtime.streaming import streamed_bytes


def main(file: str, threads: str, steps: str, streamed: str, buffers: str, artifact: str = "") -> None:
    spec, digest = SPEC, DIGEST
    if artifact:
        opened = open_artifact(artifact, "gptq")
        spec, digest = opened.spec, opened.digest
    plan = ResidencyPlan.spread(
        spec.num_layers, int(streamed), streamed_head=not artifact, buffers=int(buffers)
    )
    source, executor = open_executor(Path(file), spec, digest, plan, int(threads), 1)
    rounds = [against_disk(source, executor, plan, int(steps), passes=1) for _ in range(3)]
    print(json.dumps({"streamed_bytes": streamed_bytes(source, plan), "rounds": rounds}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
