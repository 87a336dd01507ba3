"""Nybble through its public interface, with token ids as prompts."""

import time
from typing import Any

from protocol import serve

import nybble
from nybble import LLM, SamplingParams


class Nybble:
    def __init__(self, model: str, threads: int, context: int, sequences: int, kv_dtype: str) -> None:
        self._llm = LLM(
            model,
            executor="cpu",
            threads=threads,
            max_model_len=context,
            max_sequences=sequences,
            kv_dtype=kv_dtype,
            speculation="off",  # a step a token, as the peers decode
            tuned=False,
        )

    def generate(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, float, list[list[int]]]:
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        start = time.perf_counter()
        answers = self._llm.generate(prompts, params)
        first = max(answer.timings.time_to_first_token or 0.0 for answer in answers)
        return start, start + first, [list(answer.token_ids) for answer in answers]

    def about(self) -> dict[str, Any]:
        return {"version": f"nybble {nybble.__version__}", "settings": "CpuExecutor, int8 activations"}


if __name__ == "__main__":
    serve(Nybble)
