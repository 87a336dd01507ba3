"""llama.cpp's parallel slots: the loop of its server (`update_slots`), over its low-level interface.

A step is one `llama_decode` of at most `BATCH` tokens: first a token of every slot whose answer goes on, then
as much of the prompts as there is room for, oldest first. A slot keeps its tokens when its answer has ended;
a new request takes over the longest beginning that any slot has in common with it. Each slot has a cache of
its own, as in the server; with `unified` they have one, in which a beginning is shared and not copied, and
each slot's attention passes over the tokens of all. The rest of the server is left out: HTTP, text, JSON.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import llama_cpp as lib
import numpy as np
from protocol import serve

BATCH = 512  # tokens of a step, and of one pass through the layers


@dataclass
class Slot:
    number: int
    request: int | None = None
    order: int = 0
    tokens: list[int] = field(default_factory=list)  # all that it is to compute, the answer so far included
    computed: int = 0
    wanted: int = 0  # tokens of the answer that are still to come


class LlamaCppSlots:
    def __init__(self, model: str, threads: int, context: int, sequences: int, unified: bool = False) -> None:
        lib.llama_backend_init()
        self._model = lib.llama_model_load_from_file(model.encode(), lib.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"{model} could not be loaded")
        self._vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        params = lib.llama_context_default_params()
        params.n_ctx = sequences * context
        params.n_batch = params.n_ubatch = BATCH
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.kv_unified = unified
        params.no_perf = True
        self._unified = unified
        self._context = lib.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError("no context could be made")
        self._memory = lib.llama_get_memory(self._context)
        self._batch = lib.llama_batch_init(BATCH, 0, 1)
        self._slots = [Slot(number) for number in range(sequences)]
        self._waiting: deque[tuple[int, list[int], int]] = deque()
        self._started = 0

    def add(self, request: int, prompt: list[int], new_tokens: int) -> None:
        self._waiting.append((request, prompt, new_tokens))

    def cancel(self) -> None:
        self._waiting.clear()
        for slot in self._slots:
            slot.request = None

    def step(self) -> Iterable[tuple[int, int]]:
        while self._waiting and any(slot.request is None for slot in self._slots):
            self._start(*self._waiting.popleft())
        running = sorted((s for s in self._slots if s.request is not None), key=lambda s: s.order)
        # Those that decode have one token left to compute.
        chunks = [(slot, 1) for slot in running if len(slot.tokens) - slot.computed == 1]
        room = BATCH - len(chunks)
        for slot in running:
            left = len(slot.tokens) - slot.computed
            if left > 1 and room > 0:
                chunks.append((slot, min(left, room)))
                room -= chunks[-1][1]
        return self._decode(chunks)

    def _start(self, request: int, prompt: list[int], new_tokens: int) -> None:
        common = [(_common(slot.tokens[: slot.computed], prompt), slot) for slot in self._slots]
        shared, donor = max(common, key=lambda pair: pair[0])
        shared = min(shared, len(prompt) - 1)  # the last token must run
        idle = [pair for pair in common if pair[1].request is None]
        # The one that has most of it by itself; else the one that is least of a loss.
        _, slot = max(idle, key=lambda pair: (pair[1] is donor, -pair[1].order))
        keep = shared if slot is donor else 0
        lib.llama_memory_seq_rm(self._memory, slot.number, keep, -1)
        if slot is not donor and shared:
            if self._unified:
                lib.llama_memory_seq_cp(self._memory, donor.number, slot.number, 0, shared)
            else:  # another buffer, which is copied as a whole
                lib.llama_memory_seq_cp(self._memory, donor.number, slot.number, -1, -1)
                lib.llama_memory_seq_rm(self._memory, slot.number, shared, -1)
        self._started += 1
        slot.request, slot.order = request, self._started
        slot.tokens, slot.computed, slot.wanted = list(prompt), shared, new_tokens

    def _decode(self, chunks: list[tuple[Slot, int]]) -> list[tuple[int, int]]:
        batch, row = self._batch, 0
        chosen: list[tuple[Slot, int]] = []
        for slot, count in chunks:
            last = len(slot.tokens) - 1
            for position in range(slot.computed, slot.computed + count):
                batch.token[row], batch.pos[row] = slot.tokens[position], position
                batch.n_seq_id[row], batch.seq_id[row][0] = 1, slot.number
                batch.logits[row] = position == last
                row += 1
            slot.computed += count
            if slot.computed > last:
                chosen.append((slot, row - 1))
        batch.n_tokens = row
        while (failed := lib.llama_decode(self._context, batch)) == 1 and self._forget_one():
            pass
        if failed:
            raise RuntimeError(f"llama_decode returned {failed}")
        got = []
        for slot, place in chosen:
            logits = lib.llama_get_logits_ith(self._context, place)
            slot.tokens.append(int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax()))
            slot.wanted -= 1
            assert slot.request is not None
            got.append((slot.request, 1))
            if not slot.wanted:
                slot.request = None
        return got

    def _forget_one(self) -> bool:
        """Makes room in the cache: the oldest that has ended is forgotten."""
        idle = [slot for slot in self._slots if slot.request is None and slot.computed]
        if idle:
            slot = min(idle, key=lambda slot: slot.order)
            lib.llama_memory_seq_rm(self._memory, slot.number, -1, -1)
            slot.tokens, slot.computed = [], 0
        return bool(idle)

    def about(self) -> dict[str, Any]:
        kind = "one cache for all slots" if self._unified else "a cache for each slot"
        return {
            "version": f"llama-cpp-python {lib.__version__}",
            "settings": f"{len(self._slots)} slots, {BATCH} tokens a step, flash attention, f16, {kind}",
            "instructions": lib.llama_print_system_info().decode(),
        }


def _common(one: list[int], other: list[int]) -> int:
    """How many leading tokens are the same."""
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return min(len(one), len(other))


if __name__ == "__main__":
    serve(LlamaCppSlots)
