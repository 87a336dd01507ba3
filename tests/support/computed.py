"""What a small model computes, as JSON: run with an installed Nybble, here and on emulated CPUs.

`python computed.py ARTIFACT [INSTRUCTION_SET]`
"""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np

import nybble
from nybble import LLM, SamplingParams
from nybble._kernels import supported_kernels
from nybble.export.artifact import open_artifact
from nybble.runtime.batch import prompt_batch
from nybble.runtime.cpu_executor import KV_TYPES, PAGE_SIZE, CpuExecutor

TOKENS = 40  # the last page is not full, and the matrix product takes its path for many tokens


def logits_digest(path: Path, isa: str) -> str:
    """SHA-256 of the logits of a prompt, and of its first token alone, for every KV type."""
    weights = open_artifact(path, "gptq").weights("gptq")
    ids = np.random.default_rng(17).integers(3, weights.spec.vocab_size, TOKENS).tolist()
    groups = len(weights.spec.window_groups)
    executor = CpuExecutor(weights, threads=2, isa=isa)
    digest = hashlib.sha256()
    for kv_dtype in KV_TYPES:
        for count in (TOKENS, 1):
            executor.allocate_kv(-(-TOKENS // PAGE_SIZE), PAGE_SIZE, kv_dtype)
            logits = executor.step(prompt_batch(ids[:count], groups, PAGE_SIZE))
            digest.update(logits.astype("<f4").tobytes())
    executor.close()
    return digest.hexdigest()


def answer(path: Path) -> list[int]:
    """Tokens of a greedy answer, by way of everything an application uses."""
    with LLM(path, threads=2, cache=False) as llm:
        output = llm.generate("The statement", SamplingParams(max_tokens=8, temperature=0))
    return list(output.token_ids)


def main(artifact: str, isa: str = "") -> None:
    path = Path(artifact)
    print(
        json.dumps(
            {
                "file": nybble.__file__,
                "kernels": supported_kernels(),
                "logits": logits_digest(path, isa),
                "answer": answer(path),
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
