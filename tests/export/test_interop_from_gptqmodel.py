"""Folders that GPTQModel wrote run here as they are, with the weights that it reads from them itself.

NYBBLE_GPTQMODEL_PYTHON as in test_interop_gptqmodel.py.
"""

import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoders import log_softmax, mean_kl, paged_logits
from foreign_python import run_cases
from numpy.typing import NDArray

from nybble import LLM, SamplingParams
from nybble.export.foreign import ForeignCheckpoint
from nybble.export.weights import LogicalWeights
from nybble.quant.packing import QuantizedTensor
from nybble.runtime.ort_executor import OrtExecutor

SCRIPT = Path(__file__).with_name("gptqmodel_quantize_script.py")
PYTHON = os.environ.get("NYBBLE_GPTQMODEL_PYTHON", "")

pytestmark = [
    pytest.mark.interop,
    pytest.mark.skipif(not PYTHON, reason="NYBBLE_GPTQMODEL_PYTHON is not set"),
]

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "4 bits": ("llama", {"bits": 4, "sym": True}),
    "4 bits, asymmetric": ("llama", {"bits": 4, "sym": False}),
    "8 bits": ("llama", {"bits": 8, "sym": True}),
    "8 bits, asymmetric": ("llama", {"bits": 8, "sym": False}),
    "desc_act": ("llama", {"bits": 4, "sym": True, "desc_act": True}),
    "3 bits": ("llama", {"bits": 3, "sym": True}),
    "gptq_v2, asymmetric": ("llama", {"bits": 4, "sym": False, "format": "gptq_v2"}),
    "qwen2, biases": ("qwen2", {"bits": 4, "sym": True}),
    "granite": ("granite", {"bits": 4, "sym": False}),
    "olmo2": ("olmo2", {"bits": 4, "sym": True}),
    "smollm3": ("smollm3", {"bits": 4, "sym": True}),
    "gemma3": ("gemma3_text", {"bits": 4, "sym": False}),
}


@dataclass(frozen=True)
class Case:
    folder: Path
    meant: dict[str, NDArray[Any]]
    result: dict[str, Any]
    tokens: NDArray[np.int64]


@pytest.fixture(scope="module")
def cases(make_tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    folder = tmp_path_factory.mktemp("from-gptqmodel")
    tokens = np.random.default_rng(0).integers(3, 512, (8, 64))
    np.save(folder / "tokens.npy", tokens)
    jobs = [
        {
            "model": str(make_tiny_model(family)),
            "output": str(folder / f"folder-{number}"),
            "settings": {"group_size": 32, "desc_act": False, **settings},
            "tokens": str(folder / "tokens.npy"),
            "meant": str(folder / f"meant-{number}.npz"),
        }
        for number, (family, settings) in enumerate(CASES.values())
    ]
    results = run_cases(PYTHON, SCRIPT, jobs, folder)
    found = {}
    for name, job, result in zip(CASES, jobs, results, strict=True):
        meant = {} if "error" in result else dict(np.load(str(job["meant"])))
        found[name] = Case(Path(str(job["output"])), meant, result, tokens)
    return found


@pytest.mark.parametrize("name", CASES)
def test_weights_and_logits_are_those_that_gptqmodel_reads(cases: dict[str, Case], name: str) -> None:
    case = cases[name]
    assert "error" not in case.result, case.result["error"]
    with closing(ForeignCheckpoint(case.folder)) as checkpoint:
        assert_as_meant(checkpoint.weights, case)


def assert_as_meant(weights: LogicalWeights, case: Case) -> None:
    spec = weights.spec
    layers = [linear.name for layer in range(spec.num_layers) for linear in spec.linears(layer)]
    assert case.result["quantized_layers"] == len(layers)
    for layer in layers:
        tensor = weights.tensor(layer)
        assert isinstance(tensor, QuantizedTensor)
        theirs = case.meant[layer.removesuffix(".weight")]
        np.testing.assert_array_equal(tensor.dequantize().astype(np.float16), theirs, layer)
    with OrtExecutor.from_weights(weights, threads=1, accuracy_level=0) as executor:
        ours = paged_logits(executor, case.tokens[0].tolist(), 64)
    # Embedding and head are rounded to 8 bits here, and in 16 there.
    assert mean_kl(case.meant["logits"][0], ours) < 1e-3


def test_a_folder_runs_on_our_kernels(cases: dict[str, Case]) -> None:
    case = cases["4 bits"]
    prompt = case.tokens[0].tolist()
    with LLM(case.folder, threads=1) as llm:
        (request,) = llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0))
    (token,) = request.token_ids
    expected = log_softmax(case.meant["logits"][0, -1:])[0]
    # The distribution is flat: what is first here need not be first there, but is as likely.
    assert expected[token] > expected.max() - 0.1
