"""Adapters that PEFT made are merged as PEFT merges them.

NYBBLE_PEFT_PYTHON names the python of an environment with peft:

    python3.11 -m venv ENV && ENV/bin/pip install -c constraints.txt peft transformers==5.24.0
"""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nybble.models import open_source
from nybble.models.hf_folder import HfFolder

SCRIPT = Path(__file__).with_name("peft_script.py")
PYTHON = os.environ.get("NYBBLE_PEFT_PYTHON", "")

pytestmark = [
    pytest.mark.interop,
    pytest.mark.skipif(not PYTHON, reason="NYBBLE_PEFT_PYTHON is not set"),
]

CASES: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {
        "attention": {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
        "all": {"r": 8, "lora_alpha": 8, "target_modules": "all-linear"},
        "stabilized": {"r": 8, "lora_alpha": 9, "use_rslora": True, "target_modules": ["down_proj"]},
        "head": {"r": 8, "lora_alpha": 8, "target_modules": ["down_proj", "lm_head"]},
        "patterns": {
            "r": 4,
            "lora_alpha": 6,
            "target_modules": ["q_proj", "o_proj", "up_proj"],
            "rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 3},
            "alpha_pattern": {"^model.layers.0.self_attn.q_proj": 20, "self_attn.o_proj": 5, "proj": 100},
        },
        "some layers": {"r": 2, "target_modules": ["k_proj"], "layers_to_transform": [1]},
        "dropout, another beginning": {
            "r": 2, "target_modules": ["k_proj"], "lora_dropout": 0.5, "init_lora_weights": "gaussian",
        },
    },
    "phi3": {"fused": {"r": 4, "lora_alpha": 16, "target_modules": ["qkv_proj", "gate_up_proj"]}},
}  # fmt: skip


@pytest.mark.parametrize("family", CASES)
def test_merged_tensors_are_pefts(family: str, make_tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    model = make_tiny_model(family)
    (tmp_path / "cases.json").write_text(json.dumps(CASES[family]), encoding="utf-8")
    run = subprocess.run(
        [PYTHON, str(SCRIPT), str(model), str(tmp_path), str(tmp_path / "cases.json")],
        capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    plain = open_source(model)
    for case in CASES[family]:
        merged = tmp_path / case / "merged"
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (merged / file).write_bytes((model / file).read_bytes())
        ours, theirs = open_source(model, tmp_path / case / "adapter"), HfFolder(merged)
        changed = 0
        for name in ours.spec.tensors():
            found = ours.tensor(name)
            np.testing.assert_allclose(
                found, theirs.tensor(name), rtol=1e-5, atol=1e-6, err_msg=f"{case}: {name}"
            )
            changed += not np.array_equal(found, plain.tensor(name))
        assert changed >= 1, case
        ours.close()
        theirs.close()
    plain.close()
