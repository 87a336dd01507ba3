"""A mixture of experts in half of the memory that it takes: a process of its own, for `streaming.py`.

`python streaming_experts.py PACKED_FILE THREADS STEPS PLAN` takes the plan as JSON, decodes one token after
the other, and prints what it found as JSON: seconds of each step, and of the second half of them the bytes
that were read for a token and the share of experts that were in memory. It lives until its input ends. The
tokens are random ones: a model of random weights would soon repeat itself, and choose the same experts again.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from seeded_models import MODELS
from streaming_runs import open_executor

from nybble.devices.residency import ResidencyPlan
from nybble.runtime.batch import Batch
from nybble.runtime.streaming import streamed_bytes

MODEL = MODELS["seeded-experts"]
CONTEXT = 64  # as many tokens as the cache of `open_executor` has room for


def main(file: str, threads: str, steps: str, plan: str) -> None:
    settings: dict[str, Any] = json.loads(plan)
    settings["streamed_layers"] = tuple(settings["streamed_layers"])
    residency, count = ResidencyPlan(**settings), int(steps)
    source, executor = open_executor(Path(file), MODEL.spec, MODEL.digest, residency, int(threads), 1)
    tokens = np.random.default_rng(5).integers(3, MODEL.spec.vocab_size, count).astype(np.int32)
    seconds, half = [], executor.expert_reads
    for number, token in enumerate(tokens):
        if number == count // 2:
            half = executor.expert_reads
        at = number % CONTEXT
        batch = Batch(
            token_ids=np.array([token], np.int32),
            cu_seqlens=np.array([0, 1], np.int32),
            past_lens=np.array([at], np.int32),
            block_table=np.arange(CONTEXT // 16 + 1, dtype=np.int32).reshape(1, 1, -1),
            slot_mapping=np.array([[at]], np.int32),
            logit_rows=np.array([0], np.int32),
        )
        start = time.perf_counter()
        executor.step(batch)
        seconds.append(time.perf_counter() - start)
    reads, rest = executor.expert_reads, count - count // 2
    needed = reads.needed - half.needed
    found = {
        "seconds": seconds,
        "bytes_per_token": streamed_bytes(source, residency) + (reads.bytes - half.bytes) / rest,
        "hit_rate": 1 - (reads.read - half.read) / needed if needed else None,
    }
    print(json.dumps(found), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
