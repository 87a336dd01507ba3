"""onnxruntime-genai loads an artifact's folder unchanged, and forced through the same text it ranks the same
token first as `OrtExecutor` does.

That is asked where the layers multiply in float32. As written, a graph rounds activations to 8 bits, and
each attention has other last bits: a few of them turn a rounding, and thirty layers make that as large as
what rounding costs at all. There each must be as near to the unrounded model as the other.

NYBBLE_GENAI_PYTHON names the python of an environment with onnxruntime-genai:

    python3.11 -m venv ENV && ENV/bin/pip install onnxruntime-genai
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from decoders import CASES, mean_kl, paged_logits
from foreign_python import run_cases
from numpy.typing import NDArray

from nybble.export import open_artifact, write_artifact
from nybble.quant.model import QuantizedModel
from nybble.quant.recipe import Recipe
from nybble.runtime.ort_executor import OrtExecutor
from nybble.runtime.tokenizer import Tokenizer

SCRIPT = Path(__file__).with_name("genai_script.py")
PYTHON = os.environ.get("NYBBLE_GENAI_PYTHON", "")

pytestmark = [
    pytest.mark.interop,
    pytest.mark.skipif(not PYTHON, reason="NYBBLE_GENAI_PYTHON is not set"),
]

TOKENS = 512
PROMPT = 32
TEXTS = ["Hello, world!", "  two  spaces\nand a line", "naïve café 日本語 🙂", "def f(x):\n    return x ** 2"]
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}]


FAMILIES = [case for case in CASES if "odd sizes" not in case]  # head_dims that are no multiple of 8


@dataclass(frozen=True)
class Case:
    """An artifact, the logits that both gave after the prompt and each later token, and what genai said."""

    artifact: Path
    ours: NDArray[np.float32]
    theirs: NDArray[np.float32]
    result: dict[str, Any]


def run(artifacts: list[Path], token_ids: list[NDArray[np.int64]], folder: Path) -> list[Case]:
    cases = []
    for number, (artifact, ids) in enumerate(zip(artifacts, token_ids, strict=True)):
        np.save(folder / f"tokens-{number}.npy", ids)
        cases.append(
            {
                "artifact": str(artifact),
                "tokens": str(folder / f"tokens-{number}.npy"),
                "prompt": PROMPT,
                "logits": str(folder / f"logits-{number}.npy"),
                "texts": TEXTS,
                "messages": MESSAGES,
            }
        )
    results = run_cases(PYTHON, SCRIPT, cases, folder)
    found = []
    for number, (artifact, ids, result) in enumerate(zip(artifacts, token_ids, results, strict=True)):
        with OrtExecutor.from_file(artifact / "onnx" / "decoder.onnx") as executor:
            ours = paged_logits(executor, ids.tolist(), PROMPT)[PROMPT - 1 :]
        theirs = np.load(folder / f"logits-{number}.npy") if "error" not in result else ours[:0]
        found.append(Case(artifact, ours, theirs, result))
    return found


@pytest.fixture(scope="module")
def tiny(
    rtn_model: Callable[..., QuantizedModel], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Case]:
    folder = tmp_path_factory.mktemp("genai")
    artifacts = []
    for number, case in enumerate(FAMILIES):
        family, overrides = CASES[case]
        model = rtn_model(family, {"max_position_embeddings": 1024, **overrides})
        artifacts.append(folder / f"artifact-{number}")
        write_artifact(model, artifacts[-1], formats=["onnx"], onnx_contract="both")
    ids = np.random.default_rng(0).integers(3, 512, TOKENS)
    return dict(zip(FAMILIES, run(artifacts, [ids] * len(artifacts), folder), strict=True))


@pytest.mark.parametrize("case", FAMILIES)
def test_every_familys_top_token_is_the_same(tiny: dict[str, Case], case: str) -> None:
    found = tiny[case]
    assert "error" not in found.result, found.result["error"]
    assert found.ours.shape == found.theirs.shape == (TOKENS - PROMPT + 1, 512)
    assert agreement(found) >= 0.98
    assert mean_kl(found.ours, found.theirs) < 1e-3


def with_float_layers(artifact: Path, out: Path) -> Path:
    """A copy whose 4-bit layers multiply in float32; the head, which is the last to round, as it was."""
    shutil.copytree(artifact, out)
    for path in (out / "onnx").glob("*.onnx"):
        model = onnx.load(path, load_external_data=False)
        for node in model.graph.node:
            attributes = {attribute.name: attribute for attribute in node.attribute}
            if node.op_type == "MatMulNBits" and attributes["bits"].i == 4:
                attributes["accuracy_level"].i = 0
        path.write_bytes(model.SerializeToString())
    return out


@pytest.fixture(scope="module")
def smollm2_cases(
    quantize_source_with_rtn: Callable[..., QuantizedModel], tmp_path_factory: pytest.TempPathFactory
) -> list[Case]:
    """As written, and with float layers."""
    from pydoc_data.topics import topics

    folder = tmp_path_factory.mktemp("genai-smollm2")
    model = quantize_source_with_rtn("smollm2", Recipe(group_size=64))
    write_artifact(model, folder / "artifact", formats=["onnx"], onnx_contract="both")
    text = "".join(topics[name] for name in sorted(topics)[1::2])[:20_000]
    ids = Tokenizer(model.tokenizer_files).encode(text, add_special_tokens=False)[:TOKENS]
    artifacts = [folder / "artifact", with_float_layers(folder / "artifact", folder / "float")]
    return run(artifacts, [np.array(ids, np.int64)] * 2, folder)


@pytest.fixture(scope="module")
def smollm2(smollm2_cases: list[Case]) -> Case:
    return smollm2_cases[0]


def agreement(case: Case) -> float:
    return float((case.ours.argmax(-1) == case.theirs.argmax(-1)).mean())


def test_smollm2s_top_token_is_the_same(smollm2_cases: list[Case]) -> None:
    for case in smollm2_cases:
        assert "error" not in case.result, case.result["error"]
        assert case.ours.shape == case.theirs.shape == (TOKENS - PROMPT + 1, 49152)
    rounded, exact = smollm2_cases
    assert agreement(exact) >= 0.98
    assert mean_kl(exact.ours, exact.theirs) < 1e-4
    assert agreement(rounded) >= 0.92
    assert mean_kl(exact.ours, rounded.theirs) < 1.5 * mean_kl(exact.ours, rounded.ours)


def test_smollm2s_tokenizer_and_chat_template_work_there(smollm2: Case) -> None:
    tokenizer = Tokenizer(open_artifact(smollm2.artifact).tokenizer_files)
    for text, ids, decoded in zip(TEXTS, smollm2.result["encoded"], smollm2.result["decoded"], strict=True):
        assert ids == tokenizer.encode(text)
        assert decoded == text
    assert smollm2.result["rendered"] == tokenizer.render_chat(MESSAGES, add_generation_prompt=True)


def test_smollm2_generates(smollm2: Case) -> None:
    assert 0 < len(smollm2.result["greedy"]) <= 16
    assert smollm2.result["greedy"][0] == smollm2.theirs[0].argmax()
