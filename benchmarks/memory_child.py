"""One start and run, whose memory `benchmarks/memory.py` watches: writes a line when the model is there, and
one when the answers are.

Takes the model, the context, the sequences and a memory budget, "none" for no other than the device's. Every
sequence comes to the end of its context.
"""

import sys

from nybble import LLM, SamplingParams

path, context, sequences, budget = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
print("imported", flush=True)
llm = LLM(
    path,
    executor="cpu",
    threads=2,
    max_model_len=context,
    max_sequences=sequences,
    memory_budget=None if budget == "none" else budget,
)
print("loaded", flush=True)
prompts = [[3 + (7 * i + j) % 500 for j in range(context - 32)] for i in range(sequences)]
llm.generate(prompts, SamplingParams(temperature=0.8, max_tokens=32, ignore_eos=True))
llm.score(prompts[0])
print("ended", flush=True)
