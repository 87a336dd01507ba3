"""Sixteen requests of all lengths, the same each time; as a program, a child process that answers them.

The program takes a model, a context in tokens and a memory budget in bytes, 0 for none, and prints the token
ids of the answers as JSON. It imports no more than a user would, so that its memory is a user's.
"""

import json
import sys

import numpy as np

from nybble import LLM, SamplingParams

REQUESTS, THREADS = 16, 2


def random_requests(vocab: int, context: int) -> tuple[list[list[int]], list[SamplingParams]]:
    random = np.random.default_rng(5)
    answers = random.integers(1, context // 3, REQUESTS).tolist()
    prompts = [random.integers(3, vocab, random.integers(1, context - a)).tolist() for a in answers]
    return prompts, [
        SamplingParams(temperature=0.7, seed=seed, max_tokens=count, ignore_eos=True)
        for seed, count in enumerate(answers)
    ]


def main() -> None:
    path, context, budget = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    limits = {"max_model_len": context, "max_sequences": REQUESTS, "threads": THREADS}
    with LLM(path, "laptop-cpu", "cpu", memory_budget=budget or "16GB", kv_dtype="f16", **limits) as llm:
        outputs = llm.generate(*random_requests(llm.tokenizer.vocab_size, context))
    print(json.dumps([list(output.token_ids) for output in outputs]))


if __name__ == "__main__":
    main()
