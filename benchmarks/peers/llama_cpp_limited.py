"""llama.cpp decoding from a mapped file, for `benchmarks/streaming.py`, which limits its memory.

`python llama_cpp_limited.py GGUF THREADS STEPS` prints the seconds of each step, one sequence, as JSON, and
lives until its input ends. Its buffers are those of steps of few tokens, so that they are small.
"""

import json
import os
import sys
import time

import llama_cpp as lib

CONTEXT, STEP_TOKENS, WARM_UP = 256, 8, 3


def main(gguf: str, threads: str, steps: str) -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    lib.llama_backend_init()
    model_params = lib.llama_model_default_params()
    model_params.use_mmap, model_params.use_mlock = True, False
    # Weights in an order of their own would be a copy that no file backs.
    model_params.use_extra_bufts = False
    model = lib.llama_model_load_from_file(gguf.encode(), model_params)
    params = lib.llama_context_default_params()
    params.n_ctx = CONTEXT
    params.n_batch = params.n_ubatch = STEP_TOKENS
    params.n_seq_max = 1
    params.n_threads = params.n_threads_batch = int(threads)
    params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED
    params.no_perf = True
    context = lib.llama_init_from_model(model, params)
    if not context:
        raise SystemExit("no context could be made")
    batch = lib.llama_batch_init(STEP_TOKENS, 0, 1)
    batch.n_tokens, batch.n_seq_id[0], batch.seq_id[0][0], batch.logits[0] = 1, 1, 0, True
    found = []
    for position in range(WARM_UP + int(steps)):
        batch.token[0], batch.pos[0] = 1000 + 997 * position % 40000, position
        start = time.perf_counter()
        if lib.llama_decode(context, batch) != 0:
            raise SystemExit("llama_decode failed")
        lib.llama_get_logits_ith(context, 0)
        found.append(time.perf_counter() - start)
    about = {"version": f"llama-cpp-python {lib.__version__}"}
    replies.write(json.dumps({"steps": found[WARM_UP:], **about}) + "\n")
    replies.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
