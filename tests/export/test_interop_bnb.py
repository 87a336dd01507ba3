"""transformers with bitsandbytes loads the bitsandbytes half unchanged and computes the same on a CPU, and
what it writes is read for what it says.

NYBBLE_BNB_PYTHON names the python of an environment with bitsandbytes:

    python3.11 -m venv ENV && ENV/bin/pip install -c constraints.txt torch transformers accelerate \\
      bitsandbytes
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from nybble import LLM, quantize
from nybble.export.foreign import ForeignCheckpoint

SCRIPT = Path(__file__).with_name("bnb_script.py")
PYTHON = os.environ.get("NYBBLE_BNB_PYTHON", "")

pytestmark = [
    pytest.mark.interop,
    pytest.mark.skipif(not PYTHON, reason="NYBBLE_BNB_PYTHON is not set"),
]

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
WRITTEN: dict[str, dict[str, Any]] = {
    "nf4": NF4,
    "nf4, scales quantized": NF4 | {"bnb_4bit_use_double_quant": True},
    "nf4, modules skipped": NF4 | {"llm_int8_skip_modules": ["o_proj", "lm_head"]},
    "int8": {"load_in_8bit": True},
}
OURS = {
    "nf4": {"method": "nf4"},
    "nf4, blocks of 128": {"method": "nf4", "group_size": 128},
    "int8": {"method": "int8"},
}


def run_cases(cases: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    file = folder / "cases.json"
    file.write_text(json.dumps(cases), encoding="utf-8")
    run = subprocess.run(
        [PYTHON, str(SCRIPT), str(file)],
        capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}, cwd=folder, check=False,
    )  # fmt: skip
    results = [
        json.loads(x.removeprefix("RESULT ")) for x in run.stdout.splitlines() if x.startswith("RESULT ")
    ]
    assert len(results) == len(cases), run.stdout[-2000:] + run.stderr[-4000:]
    for result in results:
        assert "error" not in result, result["error"]
    return results


@pytest.fixture(scope="module")
def results(
    make_tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], Path]:
    """Folders with `model`, `weights.safetensors` and `logits.npy`, by who wrote the model and how."""
    folder = tmp_path_factory.mktemp("bnb")
    source = make_tiny_model(
        "qwen2", intermediate_size=128, hidden_size=128, num_attention_heads=8, head_dim=16
    )
    np.save(folder / "tokens.npy", np.random.default_rng(0).integers(3, 512, 64))
    cases, found = [], {}
    for number, (name, settings) in enumerate((*WRITTEN.items(), *OURS.items())):
        theirs = number < len(WRITTEN)
        place = folder / str(number)
        place.mkdir()
        case: dict[str, Any] = {
            "tokens": str(folder / "tokens.npy"),
            "weights": str(place / "weights.safetensors"),
            "logits": str(place / "logits.npy"),
        }
        if theirs:
            case |= {"do": "write", "source": str(source), "out": str(place / "model"), "settings": settings}
        else:
            quantize(source, place / "model", formats=["bnb"], threads=1, **settings)
            case |= {"do": "run", "folder": str(place / "model")}
        cases.append(case)
        found["theirs" if theirs else "ours", name] = place
    for place, result in zip(found.values(), run_cases(cases, folder), strict=True):
        assert result["layers"] in (12, 14)
        # transformers writes no tokenizer with a model.
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(source / name, place / "model" / name)
    return found


KEYS = [*(("theirs", name) for name in WRITTEN), *(("ours", name) for name in OURS)]


@pytest.mark.parametrize("key", KEYS, ids=" ".join)
def test_weights_mean_the_same(results: dict[tuple[str, str], Path], key: tuple[str, str]) -> None:
    """Within float16: bitsandbytes' own NF4 weights are rounded to it, and our scales."""
    from nybble.export import open_artifact

    folder, ours = results[key] / "model", key[0] == "ours"
    weights: Any = open_artifact(folder).checkpoint() if ours else ForeignCheckpoint(folder).weights
    expected = load_file(results[key] / "weights.safetensors")
    for name, values in expected.items():
        found = weights.tensor(name).dequantize()
        # Rounding to float16 is at most 2⁻¹¹ of a number, and is done twice; ours has no second one.
        assert np.allclose(found, values, rtol=2**-11 if ours else 2**-10, atol=2**-24), name


@pytest.mark.parametrize("executor", ["cpu", "ort"])
@pytest.mark.parametrize("key", KEYS, ids=" ".join)
def test_logits_agree(
    results: dict[tuple[str, str], Path], key: tuple[str, str], executor: str,
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ids = np.load(results[key].parent / "tokens.npy").tolist()
    logits = np.load(results[key] / "logits.npy").astype(np.float64)
    logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
    expected = logits[np.arange(len(ids) - 1), ids[1:]]
    with LLM(results[key] / "model", executor=executor, threads=1, max_model_len=128) as llm:
        found = np.array(llm.score(ids).logprobs[1:], np.float64)
    # LLM.int8() and we round activations otherwise, and our kernels NF4's code book; another weight changes
    # them by 1 and more.
    error = np.abs(found - expected)
    assert error.mean() < 0.04
    assert error.max() < 0.2
