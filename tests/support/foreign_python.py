"""Scripts that run in another package's own environment, and what they compare with."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
from decoders import stored

from nybble.quant.model import QuantizedModel
from nybble.quant.packing import QuantizedTensor


def run_cases(python: str, script: Path, cases: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """What `script` prints about each case, a line of JSON after RESULT, run by `python` in `folder`."""
    cases_file = folder / "cases.json"
    cases_file.write_text(json.dumps(cases), encoding="utf-8")
    # GPTQModel does not start with fewer workers than two.
    environment = {**os.environ, "GPTQMODEL_CPU_WORKERS": "2", "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(
        [python, str(script), str(cases_file)],
        capture_output=True, text=True, env=environment, cwd=folder, check=False,
    )  # fmt: skip
    results = [
        json.loads(x.removeprefix("RESULT ")) for x in run.stdout.splitlines() if x.startswith("RESULT ")
    ]
    assert len(results) == len(cases), run.stdout[-2000:] + run.stderr[-4000:]
    return results


def write_reference(model: QuantizedModel, folder: Path) -> None:
    """A Hugging Face folder of what the artifact's numbers stand for, in float32."""
    from safetensors.numpy import save_file

    folder.mkdir()
    tensors = {
        name: t.dequantize() if isinstance(t, QuantizedTensor) else t.astype(np.float32)
        for name, t in model.tensors.items()
    }
    save_file(stored(model.spec, tensors), folder / "model.safetensors", metadata={"format": "pt"})
    config = {**model.config, "dtype": "float32", "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
