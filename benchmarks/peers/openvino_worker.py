"""OpenVINO GenAI: `ContinuousBatchingPipeline`, its own scheduler, on the model it made of the GGUF file."""

import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from protocol import serve


class OpenVino:
    def __init__(self, model: str, threads: int, context: int, sequences: int) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.max_num_batched_tokens = max(context, 512)
        properties = {"INFERENCE_NUM_THREADS": threads}
        self._pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self._requests = 0

    def generate(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, float, list[list[int]]]:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = new_tokens, True, False
        inputs = [ov.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        start, first = time.perf_counter(), 0.0
        handles = []
        for tensor in inputs:
            handles.append(self._pipeline.add_request(self._requests, tensor, config))
            self._requests += 1
        waiting = set(range(len(handles)))
        tokens: list[list[int]] = [[] for _ in prompts]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            for i, handle in enumerate(handles):
                if handle.can_read():
                    for output in handle.read().values():
                        tokens[i] += output.generated_ids
            if waiting and all(tokens):
                waiting.clear()
                first = time.perf_counter()
        return start, first, tokens

    def about(self) -> dict[str, Any]:
        return {
            "version": f"openvino-genai {genai.__version__}",
            "settings": "prefix caching off, model made from the Q4_1 GGUF",
        }


def prepare(gguf: Path, folder: Path, work: Path) -> dict[str, Path]:
    """OpenVINO reads the GGUF and saves its own form beside it, which loads faster the next time."""
    target = work / "openvino"
    if not (target / "openvino_model.xml").exists():
        target.mkdir(parents=True, exist_ok=True)
        copy = target / "model.gguf"
        shutil.copyfile(gguf, copy)
        genai.LLMPipeline(copy, "CPU", enable_save_ov_model=True)
        copy.unlink()
    return {"INT4": target}


if __name__ == "__main__":
    serve(OpenVino, prepare)
