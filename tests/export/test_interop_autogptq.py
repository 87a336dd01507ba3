"""AutoGPTQ 0.7.1, the last there is, loads the GPTQ half and computes the same on a CPU.

NYBBLE_AUTOGPTQ_PYTHON names the python of an environment of its time, as the Makefile makes it.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foreign_python import run_cases, write_reference

from nybble.export import write_artifact
from nybble.quant.model import QuantizedModel

SCRIPT = Path(__file__).with_name("autogptq_script.py")
PYTHON = os.environ.get("NYBBLE_AUTOGPTQ_PYTHON", "")

pytestmark = [
    pytest.mark.interop,
    pytest.mark.skipif(not PYTHON, reason="NYBBLE_AUTOGPTQ_PYTHON is not set"),
]

CASES: dict[str, dict[str, Any]] = {
    "4 bits": {},
    "4 bits, asymmetric": {"symmetric": False},
    "8 bits": {"bits": 8},
    "8 bits, asymmetric": {"bits": 8, "symmetric": False},
    "desc_act": {"act_order": "dynamic"},
    "tied": {"config_overrides": {"tie_word_embeddings": True}},
}


@pytest.fixture(scope="module")
def results(
    rtn_model: Callable[..., QuantizedModel], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    folder, cases = tmp_path_factory.mktemp("autogptq"), []
    np.save(folder / "tokens.npy", np.random.default_rng(0).integers(3, 512, (4, 64)))
    for number, settings in enumerate(CASES.values()):
        paths = {name: folder / f"{name}-{number}" for name in ("artifact", "reference")}
        model = rtn_model(**settings)
        # It knows no other format; zero points in it are only GPTQModel's to refuse.
        write_artifact(model, paths["artifact"], formats=["gptq"], checkpoint_format="gptq")
        write_reference(model, paths["reference"])
        cases.append({**{k: str(v) for k, v in paths.items()}, "tokens": str(folder / "tokens.npy")})
    return dict(zip(CASES, run_cases(PYTHON, SCRIPT, cases, folder), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_it_computes_the_same(results: dict[str, dict[str, Any]], case: str) -> None:
    result = results[case]
    assert "error" not in result, result["error"]
    assert result["quantized_layers"] == 14
    assert result["kl"] < 1e-9
    assert result["top1"] == 1.0
