"""A mixture of experts from a Hugging Face folder to answers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from experts import with_fused_experts

from nybble import LLM, SamplingParams, quantize
from nybble.export import open_artifact, verify_integers
from nybble.export.gptq_reader import GptqWeights
from nybble.quant.packing import QuantizedTensor

IDS = list(range(3, 90))
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 96,
        "mlp_only_layers": [0],
    },
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32},
}


@pytest.fixture(scope="module", params=FAMILIES)
def source(request: pytest.FixtureRequest, make_tiny_model: Callable[..., Path]) -> Path:
    return make_tiny_model(request.param, **FAMILIES[request.param])


@pytest.fixture(scope="module")
def artifact(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("experts") / "artifact"
    quantize(source, out, samples=4, seq_len=64, group_size=32, act_order="dynamic")
    return out


def transformers_scores(source: Path, artifact: Path) -> np.ndarray:
    """Log-probabilities of `IDS` by transformers with the artifact's weights."""
    import torch
    from transformers import AutoModelForCausalLM

    state = {}
    with GptqWeights(artifact) as weights:
        for name in weights.spec.tensors():
            tensor = weights.tensor(name)
            values = tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor
            state[name] = torch.from_numpy(np.array(values, np.float32))
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    model.load_state_dict(with_fused_experts(state))
    with torch.no_grad():
        logits = model(torch.tensor([IDS])).logits[0].log_softmax(-1)
    return np.asarray(logits[:-1].gather(1, torch.tensor(IDS[1:])[:, None])[:, 0])


def test_both_halves_hold_the_same_experts_and_run_on_both_executors(source: Path, artifact: Path) -> None:
    assert verify_integers(artifact) == len(open_artifact(artifact).spec.tensors())
    expected = transformers_scores(source, artifact)
    for executor, half in (("cpu", "gptq"), ("cpu", "onnx"), ("ort", "onnx"), ("ort", "gptq")):
        with LLM(artifact, executor=executor, format=half, threads=1, max_model_len=128) as llm:
            scores = np.array(llm.score(IDS).logprobs[1:], np.float32)
            answers = [llm.generate(IDS, SamplingParams(max_tokens=8, ignore_eos=True)) for _ in "ab"]
        assert answers[0].token_ids == answers[1].token_ids
        # Activations in 8 bits, and a token near the border between two experts may go to the other; another
        # weight changes them by 1 and more.
        error = np.abs(scores - expected)
        assert np.median(error) < 0.04
        assert error.mean() < 0.08


def test_a_batch_gives_each_the_answer_that_it_gets_alone(artifact: Path) -> None:
    prompts = [IDS[i : i + 20 + 7 * i] for i in range(6)]
    settings = SamplingParams(max_tokens=12, ignore_eos=True)
    with LLM(artifact, executor="cpu", threads=2, max_model_len=128) as llm:
        alone = [llm.generate(prompt, settings).token_ids for prompt in prompts]
        together = [output.token_ids for output in llm.generate(prompts, settings)]
    assert together == alone


def test_info_and_the_manifest_tell_of_experts(artifact: Path, nybble: Callable[..., Any]) -> None:
    spec, manifest = open_artifact(artifact).spec, open_artifact(artifact).manifest
    assert spec.mixture is not None
    experts = f"{spec.mixture.experts_per_token} of {spec.mixture.num_experts} for a token"
    assert experts in nybble("info", artifact).out
    data = json.loads(nybble("info", artifact, "--json").out)
    assert data["starved_experts"] == dict(manifest.starved_experts)
    assert bool(manifest.starved_experts) == (spec.mixture.num_experts > 4)
    assert set(manifest.starved_experts) <= {str(layer) for layer in spec.mixture.layers}
