"""llama.cpp through llama-cpp-python's low-level interface: `llama_decode` and the largest logit.

A build may lack instruction sets that this machine has; `about` says which are in use. All are with
`CMAKE_ARGS="-DGGML_NATIVE=ON" pip install --no-binary llama-cpp-python llama-cpp-python`. Under a hypervisor
that lists AMX and does not grant it, that build ends with an illegal instruction: there, name the sets,
`-DGGML_NATIVE=OFF -DGGML_AVX512=ON -DGGML_AVX512_VBMI=ON -DGGML_AVX512_VNNI=ON -DGGML_AVX512_BF16=ON`.
"""

import ctypes
import time
from pathlib import Path
from typing import Any

import llama_cpp as lib
import numpy as np
from protocol import serve

QUANTIZED = {"Q4_0": lib.LLAMA_FTYPE_MOSTLY_Q4_0, "Q4_K_M": lib.LLAMA_FTYPE_MOSTLY_Q4_K_M}
UBATCH = 512  # tokens of one pass through the layers, llama.cpp's own default


class LlamaCpp:
    def __init__(self, model: str, threads: int, context: int, sequences: int) -> None:
        lib.llama_backend_init()
        self._model = lib.llama_model_load_from_file(model.encode(), lib.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"{model} could not be loaded")
        self._vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self._threads, self._context = threads, context
        self._contexts: dict[tuple[int, int], Any] = {}
        self._batch = lib.llama_batch_init(context, 0, 1)
        self._open(1, context)

    def _open(self, sequences: int, context: int) -> Any:
        """A context of its own for each number of sequences: a cache shared by all is slower for each."""
        params = lib.llama_context_default_params()
        params.n_ctx = sequences * context
        params.n_batch = min(context, 4096)
        params.n_ubatch = UBATCH
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = self._threads
        params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.no_perf = True
        opened = lib.llama_init_from_model(self._model, params)
        if not opened:
            raise RuntimeError("no context could be made")
        self._contexts[sequences, context] = opened
        return opened

    def _decode(self, context: Any, rows: list[tuple[int, int, int, bool]]) -> None:
        """Runs rows of (token, position, sequence, wants logits)."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if lib.llama_decode(context, batch) != 0:
            raise RuntimeError("llama_decode failed")

    def _best(self, context: Any, row: int) -> int:
        logits = lib.llama_get_logits_ith(context, row)
        return int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())

    def generate(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, float, list[list[int]]]:
        length = -(-(max(map(len, prompts)) + new_tokens) // 256) * 256  # llama.cpp rounds up to this
        key = (len(prompts), self._context if len(prompts) == 1 else length)
        context = self._contexts.get(key) or self._open(*key)
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        step = lib.llama_n_batch(context)
        start = time.perf_counter()
        tokens: list[list[int]] = []
        for sequence, prompt in enumerate(prompts):
            for at in range(0, len(prompt), step):
                rows = [
                    (prompt[i], i, sequence, i == len(prompt) - 1)
                    for i in range(at, min(at + step, len(prompt)))
                ]
                self._decode(context, rows)
            tokens.append([self._best(context, -1)])
        first = time.perf_counter()
        for past in range(new_tokens - 1):
            pairs = enumerate(zip(prompts, tokens, strict=True))
            self._decode(context, [(t[-1], len(p) + past, s, True) for s, (p, t) in pairs])
            for sequence, answer in enumerate(tokens):
                answer.append(self._best(context, sequence))
        return start, first, tokens

    def about(self) -> dict[str, Any]:
        return {
            "version": f"llama-cpp-python {lib.__version__}",
            "settings": "flash attention, f16 cache",
            "instructions": lib.llama_print_system_info().decode(),
        }


def prepare(gguf: Path, folder: Path, work: Path) -> dict[str, Path]:
    """Quantizes the GGUF to the other 4-bit types. Where a row is no multiple of 256 values, as most are in
    SmolLM2-135M, Q4_K_M falls back to 5 and 8 bits, which is llama.cpp's own rule."""
    models = {gguf.stem.rsplit(".", 1)[-1]: gguf}
    for name, file_type in QUANTIZED.items():
        target = work / f"{name}.gguf"
        if not target.exists():
            params = lib.llama_model_quantize_default_params()
            params.ftype, params.allow_requantize = file_type, True
            if lib.llama_model_quantize(str(gguf).encode(), str(target).encode(), ctypes.byref(params)) != 0:
                raise RuntimeError(f"{gguf} could not be quantized to {name}")
        models[name] = target
    return models


if __name__ == "__main__":
    serve(LlamaCpp, prepare)
