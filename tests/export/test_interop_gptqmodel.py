"""GPTQModel, and transformers on top of it, load the GPTQ half unchanged and compute the same.

NYBBLE_GPTQMODEL_PYTHON names the python of an environment with gptqmodel (and optimum, for transformers):

    python3.11 -m venv ENV && ENV/bin/pip install torch==2.13.0 setuptools wheel
    ENV/bin/pip install --no-build-isolation -c constraints.txt gptqmodel optimum transformers==5.24.0
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
from nybble.quant.recipe import Recipe

SCRIPT = Path(__file__).with_name("gptqmodel_script.py")
PYTHON = os.environ.get("NYBBLE_GPTQMODEL_PYTHON", "")

pytestmark = [
    pytest.mark.interop,
    pytest.mark.skipif(not PYTHON, reason="NYBBLE_GPTQMODEL_PYTHON is not set"),
]

TINY: dict[str, dict[str, Any]] = {
    "4 bits, group 32": {},
    "8 bits": {"bits": 8},
    "3 bits": {"bits": 3},
    "3 bits, asymmetric": {"bits": 3, "symmetric": False},
    "a group per row": {"group_size": -1},
    "group 64, the last of 96 is short": {"group_size": 64},
    "group 128, shorter rows": {"group_size": 128, "bits": 8},
    "desc_act": {"act_order": "dynamic"},
    "desc_act, short group": {"act_order": "dynamic", "group_size": 64},
    "asymmetric": {"symmetric": False},
    "asymmetric, 8 bits, desc_act": {"symmetric": False, "bits": 8, "act_order": "dynamic"},
    "gptq_v2": {"checkpoint_format": "gptq_v2"},
    "qwen2, biases": {"family": "qwen2"},
    "qwen3": {"family": "qwen3"},
    "granite": {"family": "granite", "symmetric": False},
    "olmo2": {"family": "olmo2"},
    "smollm3": {"family": "smollm3"},
    "gemma3": {"family": "gemma3_text", "symmetric": False},
    "tied": {"config_overrides": {"tie_word_embeddings": True}},
    "shards": {"shard_limit": 60_000},
    "transformers": {"loader": "transformers"},
    "transformers, asymmetric": {"loader": "transformers", "symmetric": False},
    "transformers, desc_act": {"loader": "transformers", "act_order": "dynamic"},
    # GPTQModel itself expects phi3's gate_up_proj in two pieces, which transformers does not load.
    "transformers, phi3": {"loader": "transformers", "family": "phi3"},
    "transformers, phi3, asymmetric, desc_act": {
        "loader": "transformers",
        "family": "phi3",
        "symmetric": False,
        "act_order": "dynamic",
    },
    "transformers, 8 bits": {"loader": "transformers", "bits": 8},
    "transformers, asymmetric, 8 bits": {"loader": "transformers", "symmetric": False, "bits": 8},
    "transformers, gemma3": {"loader": "transformers", "family": "gemma3_text"},
}


@pytest.fixture(scope="module")
def tiny_results(
    rtn_model: Callable[..., QuantizedModel], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("interop")
    np.save(folder / "tokens.npy", np.random.default_rng(0).integers(3, 512, (4, 64)))
    cases = []
    for number, settings in enumerate(TINY.values()):
        settings = dict(settings)
        loader = settings.pop("loader", "gptqmodel")
        writer = {k: settings.pop(k) for k in ("checkpoint_format", "shard_limit") if k in settings}
        model = rtn_model(**settings)
        write_artifact(model, folder / f"artifact-{number}", formats=["gptq"], **writer)
        write_reference(model, folder / f"reference-{number}")
        cases.append(
            {
                "artifact": str(folder / f"artifact-{number}"),
                "reference": str(folder / f"reference-{number}"),
                "tokens": str(folder / "tokens.npy"),
                "loader": loader,
            }
        )
    return dict(zip(TINY, run_cases(PYTHON, SCRIPT, cases, folder), strict=True))


@pytest.mark.parametrize("case", TINY)
def test_it_dequantizes_the_same_weights_and_computes_the_same(
    tiny_results: dict[str, dict[str, Any]], case: str
) -> None:
    result = tiny_results[case]
    assert "error" not in result, result["error"]
    assert result["quantized_layers"] == (8 if "phi3" in case else 14)
    assert result["different_weights"] == []
    assert result["kl"] < 1e-4


@pytest.mark.slow  # float16 on a CPU: eight minutes
def test_smollm2_in_its_fp16_agrees_with_our_dequantized_weights(
    quantize_source_with_rtn: Callable[..., QuantizedModel], tmp_path: Path
) -> None:
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer

    model = quantize_source_with_rtn("smollm2", Recipe(group_size=64))
    write_artifact(model, tmp_path / "artifact", formats=["gptq"])
    write_reference(model, tmp_path / "reference")
    tokenizer = Tokenizer.from_file(str(tmp_path / "artifact" / "tokenizer.json"))
    text = "".join(topics[name] for name in sorted(topics))[:100_000]
    ids = tokenizer.encode(text, add_special_tokens=False).ids[: 8 * 512]
    np.save(tmp_path / "tokens.npy", np.array(ids, np.int64).reshape(8, 512))
    case = {name: str(tmp_path / name) for name in ("artifact", "reference")}
    case |= {"tokens": str(tmp_path / "tokens.npy"), "loader": "gptqmodel"}
    (result,) = run_cases(PYTHON, SCRIPT, [case], tmp_path)
    assert "error" not in result, result["error"]
    assert result["kernels"] == ["TorchLinear"]
    assert result["quantized_layers"] == 210
    assert result["different_weights"] == []
    assert result["tokens"] == 4096
    assert result["kl"] < 1e-3
    assert result["top1"] >= 0.99
