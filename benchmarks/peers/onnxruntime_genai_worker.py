"""onnxruntime-genai on the INT4 CPU model of its own model builder: int8 activations, blocks of 32."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai as genai
from protocol import serve


class OnnxRuntimeGenAI:
    def __init__(self, model: str, threads: int, context: int, sequences: int) -> None:
        config = genai.Config(model)
        config.overlay(
            json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}})
        )
        self._model = genai.Model(config)

    def generate(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, float, list[list[int]]]:
        length = len(prompts[0]) + new_tokens
        params = genai.GeneratorParams(self._model)
        # As long as the answer must be, so that no end token ends it.
        params.set_search_options(
            batch_size=len(prompts), max_length=length, min_length=length, do_sample=False
        )
        generator = genai.Generator(self._model, params)
        start = time.perf_counter()
        generator.append_tokens(np.array(prompts, np.int32))
        tokens: list[list[int]] = [[] for _ in prompts]
        first = 0.0
        for step in range(new_tokens):
            generator.generate_next_token()
            for answer, token in zip(tokens, generator.get_next_tokens(), strict=True):
                answer.append(int(token))
            if step == 0:
                first = time.perf_counter()
        return start, first, tokens

    def about(self) -> dict[str, Any]:
        return {
            "version": f"onnxruntime-genai {genai.__version__}",
            "settings": "INT4, blocks of 32, accuracy level 4",
        }


def prepare(gguf: Path, folder: Path, work: Path) -> dict[str, Path]:
    """Runs the model builder on the float32 folder. It needs torch and transformers in this Python."""
    target = work / "onnxruntime-genai"
    if not (target / "genai_config.json").exists():
        options = ["--extra_options", "accuracy_level=4", "block_size=32"]
        command = [
            sys.executable,
            "-P",  # nothing of the folder that this was started in, where a file may have a package's name
            "-m",
            "onnxruntime_genai.models.builder",
            "-i",
            str(folder),
            "-o",
            str(target),
        ]
        command += ["-p", "int4", "-e", "cpu", "-c", str(work / "cache"), *options]
        subprocess.run(command, check=True, stdout=sys.stderr)
    return {"INT4": target}


if __name__ == "__main__":
    serve(OnnxRuntimeGenAI, prepare)
