"""The plan against what a process really holds: SmolLM2 on our kernels, and a graph of its shape with random
weights on ONNX Runtime."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnxruntime")

RUN = """
import json, sys
from pathlib import Path
import numpy as np
import tokenizers, safetensors, jinja2
from nybble.devices import RunSettings, load_profile, plan_memory
from nybble.export.onnx_writer import write_onnx
from nybble.models.spec import ModelSpec, RopeSpec
from nybble.quant.packing import QuantizedTensor
from nybble.quant.recipe import Recipe

folder, write = Path(sys.argv[1]), sys.argv[2] == "write"
CONTEXT, CHUNK, PAGE = 1024, 256, 16
spec = ModelSpec("llama", 49152, 576, 1536, 30, 9, 3, 64, 8192, 1e-5, RopeSpec(1e5, 64), tied_embeddings=True)

class Weights:
    def __init__(self):
        self.spec, self.shapes, self.random = spec, spec.tensors(), np.random.default_rng(0)

    def tensor(self, name):
        shape = self.shapes[name]
        if len(shape) == 1:
            return np.ones(shape, np.float32)
        bits, group = (8, 32) if name == spec.embedding_name else (4, 64)
        packed = self.random.integers(0, 256, (shape[0], shape[1] * bits // 8), dtype=np.uint8)
        scales = np.full((shape[0], shape[1] // group), 0.01, np.float16)
        return QuantizedTensor(packed, scales, None, bits, group, shape[1])

if write:
    write_onnx(Weights(), folder)
    sys.exit()

from nybble.runtime.batch import Batch
from nybble.runtime.ort_executor import OrtExecutor

executor = OrtExecutor.from_file(folder / "decoder.onnx", threads=2)
executor.allocate_kv(CONTEXT // PAGE, PAGE, "f32")
tokens = np.random.default_rng(1).integers(0, spec.vocab_size, CONTEXT).astype(np.int32)
for past in range(0, CONTEXT, CHUNK):
    width = (past + CHUNK) // PAGE
    executor.step(
        Batch(
            tokens[past : past + CHUNK],
            np.array([0, CHUNK], np.int32),
            np.array([past], np.int32),
            np.arange(width, dtype=np.int32)[None, None],
            np.arange(past, past + CHUNK, dtype=np.int32)[None],
            np.array([CHUNK - 1], np.int32),
        )
    )
status = Path("/proc/self/status").read_text()
peak = 1024 * int(status.split("VmHWM:")[1].split()[0])
plan = plan_memory(
    RunSettings(spec, Recipe(), load_profile("laptop-cpu"), context=CONTEXT, token_budget=CHUNK)
)
print(json.dumps({"peak": peak, "planned": plan.total - 650 * spec.vocab_size}))
"""


# All that a run may do: every sequence at the end of its context at once, sampling, log-probabilities, a
# score.
RUN_ON_KERNELS = """
import json, sys
from contextlib import closing
from pathlib import Path
import numpy as np
from nybble import LLM, SamplingParams
from nybble.devices import RunSettings, load_profile, plan_memory
from nybble.runnable import open_runnable

path, context, sequences, kv_dtype, cache = sys.argv[1], *map(int, sys.argv[2:4]), *sys.argv[4:]
settings = {"kv_dtype": kv_dtype, "threads": 2}
limits = {"max_model_len": context, "max_sequences": sequences}
with LLM(path, "laptop-cpu", "cpu", cache=cache == "cache", **limits, **settings) as llm:
    prompts = np.random.default_rng(1).integers(3, 49152, (sequences, context - 64)).tolist()
    llm.generate(prompts, SamplingParams(max_tokens=64, ignore_eos=True, temperature=0.8, logprobs=2))
    llm.score(prompts[0])
peak = 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
with closing(open_runnable(path, "auto", "cpu")) as model:
    plan = plan_memory(
        RunSettings(
            model.spec, model.recipe, load_profile("laptop-cpu"), context=context, sequences=sequences,
            executor="cpu", half=model.half, linear_bytes=model.linear_bytes, **settings,
        )
    )
print(json.dumps({"peak": peak, "planned": plan.total}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from Linux's /proc")
@pytest.mark.parametrize(
    ("model", "context", "sequences", "kv_dtype", "cache"),
    [
        ("artifact", 1024, 1, "f16", "none"),
        ("artifact", 1024, 1, "f16", "cache"),
        ("artifact", 2048, 4, "int8", "cache"),
        ("artifact", 3000, 1, "f32", "cache"),
        ("gguf", 1024, 1, "f16", "none"),
        ("gguf", 1024, 1, "f16", "cache"),
    ],
)
def test_our_kernels_stay_within_the_plan_and_near_it(
    request: Any, tmp_path: Path, model: str, context: int, sequences: int, kv_dtype: str, cache: str
) -> None:
    path = "smollm2"
    if model == "artifact":
        path = str(shutil.copytree(request.getfixturevalue("smollm2").path, tmp_path / "copy"))
    command = [sys.executable, "-c", RUN_ON_KERNELS, path, str(context), str(sequences), kv_dtype, cache]
    home = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=home)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["peak"] <= found["planned"] <= 1.15 * found["peak"]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from Linux's /proc")
def test_the_plan_for_onnx_runtime_is_within_a_fifth_of_the_peak(tmp_path):
    def run(mode: str) -> str:
        command = [sys.executable, "-c", RUN, str(tmp_path), mode]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        return result.stdout

    run("write")  # in a process of its own, so that its memory isn't counted
    found = json.loads(run("measure"))
    assert found["planned"] == pytest.approx(found["peak"], rel=0.2)
