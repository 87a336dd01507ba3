"""OpenVINO GenAI's continuous batching: `ContinuousBatchingPipeline`, prefix caching on, its scheduler's
defaults for the rest (split-fuse, 256 tokens a step)."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from protocol import serve


class OpenVinoBatching:
    def __init__(
        self, model: str, threads: int, context: int, sequences: int, batch_tokens: int | None = None
    ) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = True
        scheduler.max_num_seqs = sequences
        if batch_tokens is not None:
            scheduler.max_num_batched_tokens = batch_tokens
        self._scheduler = scheduler
        self._pipeline = genai.ContinuousBatchingPipeline(
            model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads}
        )
        self._ids = 0
        self._handles: dict[int, Any] = {}

    def add(self, request: int, prompt: list[int], new_tokens: int) -> None:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = new_tokens, True, False
        tensor = ov.Tensor(np.array([prompt], np.int64))
        self._handles[request] = self._pipeline.add_request(self._ids, tensor, config)
        self._ids += 1

    def step(self) -> Iterable[tuple[int, int]]:
        self._pipeline.step()
        got = []
        for request, handle in list(self._handles.items()):
            if handle.can_read():
                count = sum(len(output.generated_ids) for output in handle.read().values())
                got.append((request, count))
            if handle.get_status() != genai.GenerationStatus.RUNNING:
                del self._handles[request]
        return got

    def cancel(self) -> None:
        for handle in self._handles.values():
            handle.cancel()
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        self._handles.clear()

    def about(self) -> dict[str, Any]:
        settings = " ".join(self._scheduler.to_string().split())
        return {"version": f"openvino-genai {genai.__version__}", "settings": settings}


if __name__ == "__main__":
    serve(OpenVinoBatching)
