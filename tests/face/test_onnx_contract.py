"""`--onnx-contract`: artifacts for onnxruntime-genai, which Nybble runs and verifies too."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from nybble import LLM, SamplingParams

Nybble = Callable[..., Any]


@pytest.fixture(scope="module")
def artifacts(
    make_tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """The same weights with each contract."""
    from nybble import quantize

    folder, made = tmp_path_factory.mktemp("contracts"), {}
    for contract in ("paged", "genai", "both"):
        made[contract] = folder / contract
        formats = ["onnx"] if contract == "genai" else ["gptq", "onnx"]
        quantize(
            make_tiny_model("qwen2"), made[contract], method="rtn", formats=formats, onnx_contract=contract
        )
    return made


def test_verify_compares_the_graphs(nybble: Nybble, artifacts: dict[str, Path]) -> None:
    for contract, rows in (("paged", 0), ("genai", 1), ("both", 1)):
        result = nybble("verify", artifacts[contract])
        assert result.code == 0, result.err
        assert result.out.count("onnxruntime-genai's graph  mean KL") == rows, result.out


def test_info_says_whose_graphs(nybble: Nybble, artifacts: dict[str, Path]) -> None:
    assert "genai" not in nybble("info", artifacts["paged"]).out
    assert "for onnxruntime-genai too" in nybble("info", artifacts["both"]).out
    described = json.loads(nybble("info", artifacts["genai"], "--json").out)
    assert described["onnx_contract"] == "genai"


@pytest.mark.parametrize("executor", ["cpu", "ort"])
def test_a_folder_with_the_other_graph_only_answers_the_same(
    artifacts: dict[str, Path], executor: str
) -> None:
    params = SamplingParams(max_tokens=12, temperature=0)
    answers = []
    for contract in ("paged", "genai"):
        with LLM(artifacts[contract], format="onnx", executor=executor, threads=1, cache=False) as llm:
            answers.append(llm.generate("A short text", params).token_ids)
    assert answers[0] == answers[1]


def test_a_graph_that_computes_something_else_is_found(
    nybble: Nybble, artifacts: dict[str, Path], tmp_path: Path
) -> None:
    """With checksums that fit: a window where the model has none."""
    copy = Path(shutil.copytree(artifacts["both"], tmp_path / "copy"))
    graph = copy / "onnx" / "genai.onnx"
    model = onnx.load(graph, load_external_data=False)
    attention = next(node for node in model.graph.node if node.op_type == "GroupQueryAttention")
    next(a for a in attention.attribute if a.name == "local_window_size").i = 3
    content = model.SerializeToString()
    graph.write_bytes(content)
    manifest = json.loads((copy / "nybble.json").read_text())
    manifest["files"]["onnx/genai.onnx"] |= {
        "size": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    (copy / "nybble.json").write_text(json.dumps(manifest))
    result = nybble("verify", copy)
    assert result.code == 1
    assert "the logits of onnx/genai.onnx differ" in result.error


def test_what_the_operator_cannot_take_is_refused_before_the_work(
    nybble: Nybble, make_tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    odd = make_tiny_model(hidden_size=48, head_dim=12)
    result = nybble("quantize", odd, "-o", tmp_path / "out", "--onnx-contract", "both")
    assert result.code == 1
    assert "head_dim is 12; GroupQueryAttention takes multiples of 8" in result.error
    result = nybble("quantize", odd, "-o", tmp_path / "out", "--onnx-contract", "genai", "--formats", "gptq")
    assert "formats has no onnx" in result.error
    assert not any(tmp_path.iterdir())
