"""The graph and the config for onnxruntime-genai, beside the paged graph and without it."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from nybble.errors import ModelFormatError, SettingError, UnsupportedModelError
from nybble.export import open_artifact, verify_files, verify_graphs, verify_integers, write_artifact
from nybble.quant.model import QuantizedModel
from nybble.quant.packing import QuantizedTensor

Make = Callable[..., QuantizedModel]


@pytest.fixture(scope="module")
def both(rtn_model: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("artifact") / "both"
    write_artifact(rtn_model(config_overrides={"tie_word_embeddings": True}), out, onnx_contract="both")
    return out


@pytest.fixture(scope="module")
def genai_only(rtn_model: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("artifact") / "genai"
    write_artifact(rtn_model(), out, formats=["onnx"], onnx_contract="genai")
    return out


def test_the_second_graph_adds_no_weights(both: Path, rtn_model: Make, tmp_path: Path) -> None:
    model = rtn_model(config_overrides={"tie_word_embeddings": True})
    write_artifact(model, tmp_path / "paged", formats=["onnx"])
    for other in (tmp_path / "paged", both):
        assert (other / "onnx" / "weights.bin").read_bytes() == (both / "onnx" / "weights.bin").read_bytes()
    entries = []
    for name in ("decoder.onnx", "genai.onnx"):
        graph = onnx.load(both / "onnx" / name, load_external_data=False).graph
        entries.append({t.name: sorted((e.key, e.value) for e in t.external_data) for t in graph.initializer})
    assert entries[0] == entries[1]
    assert all(dict(entry)["location"] == "weights.bin" for entry in entries[0].values())


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "smollm3"])
def test_onnx_checker_passes_and_only_operators_of_onnxruntime_are_called(
    family: str, rtn_model: Make, tmp_path: Path
) -> None:
    write_artifact(rtn_model(family), tmp_path / "out", formats=["onnx"], onnx_contract="genai")
    graph = tmp_path / "out" / "onnx" / "genai.onnx"
    onnx.checker.check_model(str(graph), full_check=True)
    model = onnx.load(graph, load_external_data=False)
    assert {opset.domain for opset in model.opset_import} == {"", "com.microsoft"}
    assert not model.functions
    assert [node.op_type for node in model.graph.node].count("GroupQueryAttention") == 2


def test_its_tensors_are_read_back_exactly(genai_only: Path, rtn_model: Make) -> None:
    artifact = open_artifact(genai_only)
    weights = artifact.weights("onnx")
    for name, expected in rtn_model().tensors.items():
        if isinstance(expected, QuantizedTensor):
            found = weights.tensor(name)
            assert isinstance(found, QuantizedTensor)
            np.testing.assert_array_equal(found.dequantize(), expected.dequantize())


def test_the_manifest_says_which_contract_and_lists_the_files(both: Path, genai_only: Path) -> None:
    manifest = json.loads((both / "nybble.json").read_text())
    assert manifest["onnx_contract"] == "both"
    halves = {name: entry["half"] for name, entry in manifest["files"].items()}
    assert halves["onnx/genai.onnx"] == halves["genai_config.json"] == "onnx"
    files = json.loads((genai_only / "nybble.json").read_text())["files"]
    assert "onnx/genai.onnx" in files
    assert "onnx/decoder.onnx" not in files
    for folder in (both, genai_only):
        assert verify_files(folder) == []
        verify_graphs(open_artifact(folder))
    verify_integers(both)


def test_a_half_that_was_deleted_may_leave_its_config(both: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(both, tmp_path / "copy"))
    shutil.rmtree(copy / "onnx")
    assert open_artifact(copy).formats == ("gptq",)
    assert verify_files(copy) == []


def test_an_older_manifest_has_the_paged_graph(rtn_model: Make, tmp_path: Path) -> None:
    write_artifact(rtn_model(), tmp_path / "out", formats=["onnx"])
    data = json.loads((tmp_path / "out" / "nybble.json").read_text())
    assert data.pop("onnx_contract") == "paged"
    (tmp_path / "out" / "nybble.json").write_text(json.dumps(data))
    assert open_artifact(tmp_path / "out").onnx_path.name == "decoder.onnx"


def test_a_graph_that_refers_to_other_bytes_is_found(both: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(both, tmp_path / "copy"))
    path = copy / "onnx" / "genai.onnx"
    model = onnx.load(path, load_external_data=False)
    norms = [t for t in model.graph.initializer if t.name.endswith("norm.weight")]
    offsets = [next(e for e in t.external_data if e.key == "offset") for t in norms[:2]]
    offsets[0].value, offsets[1].value = offsets[1].value, offsets[0].value
    path.write_bytes(model.SerializeToString())
    with pytest.raises(
        ModelFormatError, match=r"genai\.onnx: model\.layers\.0\.\w+_layernorm\.weight lies at"
    ):
        verify_graphs(open_artifact(copy))


def test_the_config_names_graph_sizes_and_special_tokens(both: Path) -> None:
    config = json.loads((both / "genai_config.json").read_text())
    model = config["model"]
    assert model["decoder"]["filename"] == "onnx/genai.onnx"
    assert (both / model["decoder"]["filename"]).exists()
    assert (model["vocab_size"], model["context_length"]) == (512, 512)
    sizes = ("head_size", "hidden_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads")
    assert [model["decoder"][key] for key in sizes] == [16, 64, 4, 2, 2]
    assert (model["bos_token_id"], model["eos_token_id"], model["pad_token_id"]) == (1, 2, 0)
    assert config["search"]["do_sample"] is False
    graph = onnx.load(both / "onnx" / "genai.onnx", load_external_data=False).graph
    names = {value.name for value in (*graph.input, *graph.output)}
    patterns = (*model["decoder"]["inputs"].values(), *model["decoder"]["outputs"].values())
    assert names == {p % layer if "%d" in p else p for p in patterns for layer in range(2)}


def config_of(model: QuantizedModel, tmp_path: Path, **changes: Any) -> dict[str, Any]:
    write_artifact(replace(model, **changes), tmp_path / "out", formats=["onnx"], onnx_contract="genai")
    return dict(json.loads((tmp_path / "out" / "genai_config.json").read_text()))


def test_every_end_token_is_named_and_sampling_is_the_models_own(rtn_model: Make, tmp_path: Path) -> None:
    settings = {"eos_token_id": [0, 5], "do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9}
    config = config_of(rtn_model(), tmp_path, generation_config=settings)
    assert config["model"]["eos_token_id"] == [0, 5, 2]  # 2 is the tokenizer's
    search = config["search"]
    assert [search[key] for key in ("do_sample", "temperature", "top_k", "top_p")] == [True, 0.7, 20, 0.9]


def test_special_tokens_may_be_the_tokenizers_alone(rtn_model: Make, tmp_path: Path) -> None:
    model = rtn_model()
    bare = {key: value for key, value in model.config.items() if not key.endswith("token_id")}
    config = config_of(model, tmp_path, config=bare, generation_config={})["model"]
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 0)


def test_what_cannot_be_said_is_refused_in_one_line(rtn_model: Make, tmp_path: Path) -> None:
    model = rtn_model()
    bare = {key: value for key, value in model.config.items() if not key.endswith("token_id")}
    files = {"tokenizer.json": model.tokenizer_files["tokenizer.json"]}
    with pytest.raises(UnsupportedModelError, match="needs an eos_token_id"):
        config_of(model, tmp_path, config=bare, generation_config={}, tokenizer_files=files)
    two = {"eos_token_id": "two"}
    with pytest.raises(ModelFormatError, match=r"generation_config\.json: eos_token_id is 'two'"):
        config_of(model, tmp_path, generation_config=two)
    with pytest.raises(ModelFormatError, match=r"^config\.json: eos_token_id is 'two'"):
        config_of(model, tmp_path, config=model.config | two, generation_config={})
    with pytest.raises(SettingError, match="onnx_contract is 'vllm'; expected paged, genai, both"):
        write_artifact(model, tmp_path / "x", onnx_contract="vllm")
    with pytest.raises(SettingError, match="onnx_contract is 'both', but formats has no onnx"):
        write_artifact(model, tmp_path / "x", formats=["gptq"], onnx_contract="both")
    assert not any(tmp_path.iterdir())
