"""The plan against what a process really holds: SmolLM2 on our kernels, and a graph of its shape with random
weights on ONNX Runtime."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from nybble.models.open import open_source

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


CHILD = Path(__file__).parents[2] / "benchmarks" / "plan_child.py"
# Model, context, sequences, cache type, whether packed weights are kept, whether all are streamed.
SMOLLM2 = [
    ("artifact", 1024, 1, "f16", True, False),
    ("artifact", 1024, 1, "f16", False, False),
    ("artifact", 2048, 4, "int8", True, False),
    ("artifact", 3000, 1, "f32", True, False),
    ("artifact", 1024, 1, "f16", True, True),
    ("smollm2", 1024, 1, "f16", False, False),
    ("smollm2", 512, 2, "int8", True, False),
    ("smollm2", 512, 1, "f16", True, True),
]
SEEDED = [
    ("seeded-360m", 1024, 4, "f16", True, False),
    ("seeded-untied", 512, 2, "int8", True, False),
    ("seeded-0.5b", 1024, 2, "f16", True, False),
    ("seeded-1.5b", 256, 1, "f16", True, False),
    ("seeded-1.5b", 512, 1, "int8", True, True),
]
SETTINGS = ("model", "context", "sequences", "kv_dtype", "cache", "streamed")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from Linux's /proc")
@pytest.mark.parametrize("case", SMOLLM2 + SEEDED, ids=lambda case: "-".join(map(str, case)))
def test_our_kernels_take_what_was_planned(request: Any, tmp_path: Path, case: tuple[Any, ...]) -> None:
    """Within 5 % or 15 MB of the peak: all that a run may do, in a process of its own."""
    settings = dict(zip(SETTINGS, case, strict=True)) | {"measure": "memory", "threads": 2}
    if settings["model"] == "artifact":
        copy = shutil.copytree(request.getfixturevalue("smollm2").path, tmp_path / "copy")
        settings["model"] = str(copy)
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    with closing(open_source("smollm2")) as source:
        for name, content in source.tokenizer_files.items():
            (tokenizer / name).write_bytes(content)
    settings["tokenizer"] = str(tokenizer)
    home = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}

    def found() -> dict[str, int]:
        command = [sys.executable, str(CHILD), json.dumps(settings)]
        result = subprocess.run(command, capture_output=True, text=True, check=False, env=home)
        assert result.returncode == 0, result.stderr
        return dict(json.loads(result.stdout))

    first, second = found(), found() if settings["cache"] else None  # packs, and maps what was packed
    for each in (first, second):
        if each is not None:
            assert abs(each["planned"] - each["peak"]) <= max(0.05 * each["peak"], 15_000_000)


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
