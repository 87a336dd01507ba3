"""The GPTQ half holds what was quantized, read back by the safetensors package and by Nybble."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from nybble.errors import ModelFormatError, NybbleError, OutputError
from nybble.export.artifact_writer import write_artifact
from nybble.export.gptq import write_gptq
from nybble.export.gptq_reader import GptqWeights
from nybble.quant.model import QuantizedModel
from nybble.quant.packing import QuantizedTensor, quantize_head

RECIPES = [
    {"bits": 4, "group_size": 32},
    {"bits": 8, "group_size": 32},
    {"bits": 4, "group_size": -1},
    {"bits": 4, "group_size": 64},  # the MLP's 96 inputs leave a short last group
    {"bits": 4, "group_size": 32, "symmetric": False},
    {"bits": 8, "group_size": 128, "symmetric": False},
    {"bits": 4, "group_size": 32, "act_order": "dynamic"},
    {"bits": 4, "group_size": 64, "act_order": "dynamic", "symmetric": False},
    {"bits": 3, "group_size": 32},
    {"bits": 3, "group_size": 64, "act_order": "dynamic", "symmetric": False},
]


def dequantized(tensors: dict[str, NDArray], stem: str, bits: int, offset: int) -> NDArray[np.float64]:
    """A linear layer's weight [out, in] from the checkpoint's tensors, by the layout's definition: codes lie
    in one stream of bits, which runs through the words of a column of `qweight` and of a row of `qzeros`."""
    qweight, qzeros = tensors[stem + ".qweight"], tensors[stem + ".qzeros"]
    scales, g_idx = tensors[stem + ".scales"].astype(np.float64), tensors[stem + ".g_idx"]

    def numbers(words: NDArray, count: int) -> list[int]:
        stream = int.from_bytes(np.ascontiguousarray(words, "<i4").tobytes(), "little")
        return [stream >> (bits * index) & (1 << bits) - 1 for index in range(count)]

    zeros = np.array([numbers(words, scales.shape[1]) for words in qzeros]) + offset
    codes = np.array([numbers(words, g_idx.size) for words in qweight.T])
    return (codes - zeros.T[:, g_idx]) * scales.T[:, g_idx]


@pytest.mark.parametrize("checkpoint_format", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_the_safetensors_package_reads_the_weights_that_were_quantized(
    rtn_model: Callable[..., QuantizedModel], tmp_path: Path, recipe: dict, checkpoint_format: str
) -> None:
    from safetensors.numpy import load_file

    model = rtn_model(**recipe)
    write_gptq(model, tmp_path, checkpoint_format=checkpoint_format)
    tensors = load_file(tmp_path / "model.safetensors")
    offset = 1 if checkpoint_format == "gptq" else 0
    for name, tensor in model.tensors.items():
        if isinstance(tensor, QuantizedTensor):
            found = dequantized(tensors, name.removesuffix(".weight"), recipe["bits"], offset)
            np.testing.assert_array_equal(found, tensor.dequantize().astype(np.float64), err_msg=name)
        else:
            np.testing.assert_array_equal(tensors[name], tensor, err_msg=name)


def test_shards_hold_the_same_tensors_and_the_index_finds_them(
    rtn_model: Callable[..., QuantizedModel], tmp_path: Path
) -> None:
    from safetensors.numpy import load_file

    model = rtn_model()
    whole, sharded = tmp_path / "whole", tmp_path / "sharded"
    whole.mkdir()
    sharded.mkdir()
    write_gptq(model, whole)
    write_gptq(model, sharded, shard_limit=60_000)
    expected = load_file(whole / "model.safetensors")
    index = json.loads((sharded / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert len(set(index["weight_map"].values())) > 2
    assert index["weight_map"].keys() == expected.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in expected.values())
    for name, file_name in index["weight_map"].items():
        np.testing.assert_array_equal(load_file(sharded / file_name)[name], expected[name], err_msg=name)
        stem = name.rsplit(".", 1)[0]
        together = {f for n, f in index["weight_map"].items() if n.rsplit(".", 1)[0] == stem}
        assert name.endswith(".bias") or len(together) == 1, f"{stem} is split over files"


ODD_HEADS = {"hidden_size": 72, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 12}


@pytest.mark.parametrize("sizes", [{}, ODD_HEADS], ids=["even", "odd"])
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.usefixtures("piece_elements")
def test_fused_layers_are_written_as_transformers_names_them_and_read_in_parts(
    rtn_model: Callable[..., QuantizedModel], tmp_path: Path, recipe: dict, sizes: dict
) -> None:
    import torch
    from safetensors.numpy import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    model = rtn_model("phi3", sizes, **recipe)
    write_artifact(model, tmp_path / "out", formats=["gptq"], checkpoint_format="gptq")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    settings = AutoConfig.from_pretrained(tmp_path / "out")
    del settings.quantization_config
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(settings)
    linears = {
        name: m for name, m in theirs.model.named_modules(prefix="model") if isinstance(m, torch.nn.Linear)
    }
    assert {name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")} == set(linears)
    with GptqWeights(tmp_path / "out") as weights:
        for name, (stored, begin, end) in model.spec.stored_rows().items():
            expected, found = model.tensors[name], weights.tensor(name)
            if not isinstance(expected, QuantizedTensor):
                continue
            stem = stored.removesuffix(".weight")
            whole = dequantized(tensors, stem, recipe["bits"], 1)
            assert whole.shape == linears[stem].weight.shape
            np.testing.assert_array_equal(whole[begin:end], expected.dequantize().astype(np.float64))
            np.testing.assert_array_equal(found.dequantize(), expected.dequantize(), err_msg=name)


def test_parts_of_one_tensor_must_be_quantized_alike(
    rtn_model: Callable[..., QuantizedModel], tmp_path: Path
) -> None:
    model, other = rtn_model("phi3"), rtn_model("phi3", group_size=64)
    permuted = rtn_model("phi3", act_order="dynamic")
    name = "model.layers.1.mlp.up_proj.weight"
    for source, what in ((other, "group_size is 32 and 64"), (permuted, "the order of columns differs")):
        tensors = {**model.tensors, name: source.tensors[name]}
        with pytest.raises(OutputError, match=f"layers.1.mlp.gate_up_proj.weight: {what}"):
            write_gptq(replace(model, tensors=tensors), tmp_path)


@pytest.mark.parametrize("checkpoint_format", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.usefixtures("piece_elements")
def test_the_reader_gives_back_what_was_quantized(
    rtn_model: Callable[..., QuantizedModel], tmp_path: Path, recipe: dict, checkpoint_format: str
) -> None:
    model = rtn_model("qwen2", {"tie_word_embeddings": False}, **recipe)
    write_artifact(model, tmp_path / "out", formats=["gptq"], checkpoint_format=checkpoint_format)
    with GptqWeights(tmp_path / "out") as weights:
        assert weights.spec == model.spec
        for name, expected in model.tensors.items():
            found = weights.tensor(name)
            if name in ("model.embed_tokens.weight", "lm_head.weight"):
                expected = quantize_head(expected)
            if not isinstance(expected, QuantizedTensor):
                assert found.dtype == np.float32
                np.testing.assert_array_equal(found, expected, err_msg=name)
                continue
            for field in ("packed", "scales", "zeros", "permutation", "bits", "group_size", "in_features"):
                np.testing.assert_array_equal(getattr(found, field), getattr(expected, field), err_msg=name)


def test_the_reader_finds_tensors_in_shards(rtn_model: Callable[..., QuantizedModel], tmp_path: Path) -> None:
    model = rtn_model()
    write_artifact(model, tmp_path / "out", formats=["gptq"], shard_limit=60_000)
    with GptqWeights(tmp_path / "out") as weights:
        for name, expected in model.tensors.items():
            if isinstance(expected, QuantizedTensor):
                np.testing.assert_array_equal(weights.tensor(name).packed, expected.packed, err_msg=name)


CONFIG_MISTAKES = [
    ({"bits": 5}, "bits is 5"),
    ({"bits": 3}, "qweight"),
    ({"bits": "4"}, "bits is '4'"),
    ({"bits": True}, "bits is True"),
    ({"bits": 8}, "qweight"),  # the tensors are of 4 bits
    ({"group_size": 0}, "group_size is 0"),
    ({"group_size": 64}, "qzeros"),
    ({"group_size": 1 << 70}, "group_size"),
    ({"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
    ({"quant_method": "awq"}, "quant_method is 'awq'"),
    ({"lm_head": 1}, "lm_head is 1"),
    ({"desc_act": "no"}, "desc_act is 'no'"),
    ({"dynamic": {"-:.*mlp.*": {}}}, "mlp"),  # its layers are quantized
]


@pytest.mark.parametrize(("change", "message"), CONFIG_MISTAKES, ids=lambda x: str(x))
def test_wrong_quantization_settings_are_refused_by_name(
    rtn_model: Callable[..., QuantizedModel], tmp_path: Path, change: dict, message: str
) -> None:
    write_artifact(rtn_model(), tmp_path / "out", formats=["gptq"])
    for name in ("config.json", "quantize_config.json"):
        path = tmp_path / "out" / name
        data = json.loads(path.read_text(encoding="utf-8"))
        (data["quantization_config"] if name == "config.json" else data).update(change)
        path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(NybbleError, match=re.escape(message)) as error:
        GptqWeights(tmp_path / "out")
    assert "\n" not in str(error.value)


def test_configs_that_disagree_are_refused(rtn_model: Callable[..., QuantizedModel], tmp_path: Path) -> None:
    write_artifact(rtn_model(), tmp_path / "out", formats=["gptq"])
    path = tmp_path / "out" / "quantize_config.json"
    path.write_text(path.read_text().replace('"sym": true', '"sym": false'), encoding="utf-8")
    with pytest.raises(ModelFormatError, match="sym is False"):
        GptqWeights(tmp_path / "out")


def test_a_missing_tensor_is_named(rtn_model: Callable[..., QuantizedModel], tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    write_artifact(rtn_model(), tmp_path / "out", formats=["gptq"])
    path = tmp_path / "out" / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.scales"]
    save_file(tensors, path)
    with pytest.raises(ModelFormatError, match=r"up_proj\.scales"):
        GptqWeights(tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model.embed_tokens.weight", np.float16("nan"), "NaN or infinity"),
        ("model.norm.weight", np.float16("inf"), "NaN or infinity"),
        ("model.layers.1.mlp.up_proj.scales", np.float16("nan"), "scale"),
        ("model.layers.1.mlp.up_proj.g_idx", np.int32(2), "g_idx"),
        ("model.layers.1.mlp.up_proj.g_idx", np.int32(-1), "g_idx"),
    ],
)
def test_a_value_that_cannot_be_is_refused_and_its_tensor_named(
    rtn_model: Callable[..., QuantizedModel], tmp_path: Path, name: str, value: Any, message: str
) -> None:
    from safetensors.numpy import load_file, save_file

    write_artifact(rtn_model(), tmp_path / "out", formats=["gptq"])
    path = tmp_path / "out" / "model.safetensors"
    tensors = load_file(path)
    tensors[name].reshape(-1)[3] = value
    save_file(tensors, path)
    logical = name.replace(".scales", ".weight").replace(".g_idx", ".weight")
    with GptqWeights(tmp_path / "out") as weights, pytest.raises(ModelFormatError, match=message) as error:
        weights.tensor(logical)
    assert logical.removesuffix(".weight") in str(error.value)


def test_the_model_must_hold_what_its_recipe_says(
    rtn_model: Callable[..., QuantizedModel], tmp_path: Path
) -> None:
    model = rtn_model()
    name = "model.layers.0.mlp.down_proj.weight"
    missing = {k: v for k, v in model.tensors.items() if k != name}
    other_bits = {**model.tensors, name: rtn_model(bits=8).tensors[name]}
    for tensors in (missing, other_bits):
        with pytest.raises(OutputError, match="down_proj"):
            write_gptq(replace(model, tensors=tensors), tmp_path)
