"""The GPTQ half holds what was quantized, read back by the safetensors package and by Nybble."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from nybble.export.gptq import write_gptq
from nybble.quant.model import QuantizedModel
from nybble.quant.packing import QuantizedTensor

RECIPES = [
    {"bits": 4, "group_size": 32},
    {"bits": 8, "group_size": 32},
    {"bits": 4, "group_size": -1},
    {"bits": 4, "group_size": 64},  # the MLP's 96 inputs leave a short last group
    {"bits": 4, "group_size": 32, "symmetric": False},
    {"bits": 8, "group_size": 128, "symmetric": False},
    {"bits": 4, "group_size": 32, "act_order": "dynamic"},
    {"bits": 4, "group_size": 64, "act_order": "dynamic", "symmetric": False},
]


def dequantized(tensors: dict[str, NDArray], stem: str, bits: int, offset: int) -> NDArray[np.float64]:
    """A linear layer's weight [out, in] from the checkpoint's tensors, by the layout's definition, one
    column at a time."""
    qweight = tensors[stem + ".qweight"].astype(np.int64) & 0xFFFFFFFF
    qzeros = tensors[stem + ".qzeros"].astype(np.int64) & 0xFFFFFFFF
    scales, g_idx = tensors[stem + ".scales"].astype(np.float64), tensors[stem + ".g_idx"]
    per_word, mask, out = 32 // bits, (1 << bits) - 1, scales.shape[1]
    rows = np.arange(out)
    weight = np.empty((out, g_idx.size))
    for column, group in enumerate(g_idx):
        code = (qweight[column // per_word] >> (bits * (column % per_word))) & mask
        zero = ((qzeros[group, rows // per_word] >> (bits * (rows % per_word))) & mask) + offset
        weight[:, column] = (code - zero) * scales[group]
    return weight


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
