"""Checkpoints that others made mean the weights that they say."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bnb_checkpoints import INT8_SETTINGS, NF4_SETTINGS, write_bnb_checkpoint
from checkpoints import Layer, write_checkpoint
from safetensors.numpy import load_file, save_file

from nybble.errors import NybbleError
from nybble.export.foreign import ForeignCheckpoint, is_foreign
from nybble.quant.packing import quantize_head
from nybble.quant.recipe import Recipe

GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ: dict[str, Any] = {
    "quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
}  # fmt: skip
ENDS = ("model.embed_tokens.weight", "lm_head.weight")


def check_weights(
    folder: Path, meant: dict[str, np.ndarray], rounded: tuple[str, ...] = (), tolerance: float = 0.0
) -> None:
    """Every tensor means what was written, within a share of it; those `rounded` to 8 bits as `quantize_head`
    says."""
    checkpoint = ForeignCheckpoint(folder)
    try:
        for name, (stored, begin, end) in checkpoint.spec.stored_rows().items():
            found, expected = checkpoint.weights.tensor(name), meant[stored][begin:end]
            if name in ENDS or name in rounded:
                expected = quantize_head(expected).dequantize()
            values = found if isinstance(found, np.ndarray) else found.dequantize()
            np.testing.assert_allclose(values, expected, rtol=tolerance, atol=0, err_msg=name)
    finally:
        checkpoint.close()


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("desc_act", [False, True])
def test_gptq(
    make_tiny_model: Callable[..., Path],
    tmp_path: Path,
    version: str,
    bits: int,
    symmetric: bool,
    desc_act: bool,
) -> None:
    layer = Layer(bits, 32, symmetric, desc_act)
    config = GPTQ | {
        "bits": bits, "sym": symmetric, "desc_act": desc_act, "checkpoint_format": version,
    }  # fmt: skip
    meant = write_checkpoint(make_tiny_model(), tmp_path / "q", config, lambda stem: layer)
    check_weights(tmp_path / "q", meant)


@pytest.mark.parametrize("group_size", [64, -1])
def test_group_sizes_and_shards(
    make_tiny_model: Callable[..., Path], tmp_path: Path, group_size: int
) -> None:
    layer = Layer(4, group_size)
    config = GPTQ | {"group_size": group_size}
    meant = write_checkpoint(make_tiny_model(), tmp_path / "q", config, lambda stem: layer, shards=3)
    check_weights(tmp_path / "q", meant)


def test_settings_of_single_layers(make_tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    dynamic = {
        r"-:.*layers\.0\.self_attn\.o_proj": {},
        r"+:.*layers\.0\..*down_proj": {"bits": 8, "group_size": 64},
        r".*layers\.1\.mlp": {"bits": 3},
    }

    def layer_of(stem: str) -> Layer | None:
        if stem.endswith("layers.0.self_attn.o_proj"):
            return None
        if stem.endswith("layers.0.mlp.down_proj"):
            return Layer(8, 64)
        return Layer(3) if ".layers.1.mlp" in stem else Layer()

    meant = write_checkpoint(make_tiny_model(), tmp_path / "q", GPTQ | {"dynamic": dynamic}, layer_of)
    check_weights(tmp_path / "q", meant, rounded=("model.layers.0.self_attn.o_proj.weight",))


def test_a_quantized_head(make_tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    source = make_tiny_model(tie_word_embeddings=False)
    meant = write_checkpoint(source, tmp_path / "q", GPTQ | {"lm_head": True}, lambda stem: Layer())
    check_weights(tmp_path / "q", meant)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [32, -1])
def test_awq(make_tiny_model: Callable[..., Path], tmp_path: Path, symmetric: bool, group_size: int) -> None:
    layer = Layer(4, group_size, symmetric)
    config = AWQ | {"group_size": group_size, "modules_to_not_convert": ["layers.1.mlp.up_proj"]}
    meant = write_checkpoint(
        make_tiny_model(),
        tmp_path / "q",
        config,
        lambda stem: None if "layers.1.mlp.up_proj" in stem else layer,
    )
    check_weights(tmp_path / "q", meant, rounded=("model.layers.1.mlp.up_proj.weight",))


FUSED: dict[str, dict[str, Any]] = {
    "words end with a part": {},
    "words are cut by a part": {"hidden_size": 72, "num_attention_heads": 6, "num_key_value_heads": 3},
}


@pytest.mark.parametrize("sizes", FUSED)
@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("desc_act", [False, True])
def test_fused_layers_in_gptq(
    make_tiny_model: Callable[..., Path], tmp_path: Path, sizes: str, bits: int, desc_act: bool
) -> None:
    """q, k and v have 72, 36 and 36 rows where a part cuts words."""
    model = make_tiny_model("phi3", **(FUSED[sizes] and {**FUSED[sizes], "head_dim": 12}))
    layer = Layer(bits, 32, False, desc_act)
    config = GPTQ | {"bits": bits, "sym": False, "desc_act": desc_act}
    # A layer that is left as it is is named as the checkpoint names it.
    config |= {"dynamic": {r"-:.*layers\.0\.self_attn\.qkv_proj": {}}}
    plain = "model.layers.0.self_attn.qkv_proj"
    meant = write_checkpoint(model, tmp_path / "q", config, lambda stem: None if stem == plain else layer)
    rounded = tuple(f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkv")
    check_weights(tmp_path / "q", meant, rounded)


def test_a_fused_layer_that_was_taken_apart(make_tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """As GPTQModel has Phi-3: gate and up by themselves, q, k and v in one piece."""
    shutil.copytree(make_tiny_model("phi3"), tmp_path / "apart")
    tensors = load_file(tmp_path / "apart" / "model.safetensors")
    for layer in range(2):
        mlp = f"model.layers.{layer}.mlp."
        gate, up = np.split(tensors.pop(f"{mlp}gate_up_proj.weight"), 2)
        tensors |= {f"{mlp}gate_proj.weight": gate.copy(), f"{mlp}up_proj.weight": up.copy()}
    save_file(tensors, tmp_path / "apart" / "model.safetensors")
    layers = {"qkv_proj": Layer(4, 32, False), "up_proj": Layer(8, 64)}
    config = GPTQ | {
        "sym": False,
        "dynamic": {"-:.*gate_proj": {}, ".*up_proj": {"bits": 8, "group_size": 64}},
    }
    meant = write_checkpoint(
        tmp_path / "apart", tmp_path / "q", config,
        lambda stem: None if "gate" in stem else layers.get(stem.rsplit(".")[-1], Layer(4, 32, False)),
    )  # fmt: skip
    for layer in range(2):
        mlp = f"model.layers.{layer}.mlp."
        gate = quantize_head(meant[f"{mlp}gate_proj.weight"]).dequantize()
        meant[f"{mlp}gate_up_proj.weight"] = np.concatenate([gate, meant[f"{mlp}up_proj.weight"]])
    check_weights(tmp_path / "q", meant)


@pytest.mark.parametrize("sizes", FUSED)
def test_fused_layers_in_awq(make_tiny_model: Callable[..., Path], tmp_path: Path, sizes: str) -> None:
    model = make_tiny_model("phi3", **(FUSED[sizes] and {**FUSED[sizes], "head_dim": 12}))
    layer = Layer(4, 32, False)
    meant = write_checkpoint(model, tmp_path / "q", AWQ, lambda stem: layer)
    check_weights(tmp_path / "q", meant)


BNB = {
    "nf4": (NF4_SETTINGS, {}, Recipe().changed(method="nf4")),
    "nf4, blocks of 128": (NF4_SETTINGS, {"blocksize": 128}, Recipe().changed(method="nf4", group_size=128)),
    "nf4, scales quantized": (NF4_SETTINGS, {"double": True}, Recipe().changed(method="nf4")),
    "int8": (INT8_SETTINGS, {}, Recipe().changed(method="int8")),
}


@pytest.mark.usefixtures("piece_elements")
@pytest.mark.parametrize("case", BNB)
@pytest.mark.parametrize("skipped", [None, "layers.1.mlp.up_proj"])
def test_bitsandbytes(
    make_tiny_model: Callable[..., Path], tmp_path: Path, case: str, skipped: str | None
) -> None:
    """Within a scale's rounding to float16."""
    settings, nf4, recipe = BNB[case]
    source = make_tiny_model("qwen2", hidden_size=128, intermediate_size=128, num_attention_heads=8)
    meant = write_bnb_checkpoint(
        source,
        tmp_path / "q",
        settings | {"llm_int8_skip_modules": None if skipped is None else [skipped]},
        lambda stem: skipped is None or skipped not in stem,
        **nf4,
    )
    rounded = () if skipped is None else (f"model.{skipped}.weight",)
    check_weights(tmp_path / "q", meant, rounded, tolerance=2**-11 + 1e-7)
    checkpoint = ForeignCheckpoint(tmp_path / "q")
    assert checkpoint.recipe == (recipe if skipped is None else None)
    checkpoint.close()


def test_settings_that_do_not_name_bitsandbytes(make_tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    settings = {name: value for name, value in NF4_SETTINGS.items() if name != "quant_method"}
    meant = write_bnb_checkpoint(make_tiny_model(intermediate_size=128), tmp_path / "q", settings)
    check_weights(tmp_path / "q", meant, tolerance=2**-11)


def test_blocks_across_rows_are_refused(make_tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    write_bnb_checkpoint(make_tiny_model(), tmp_path / "q", NF4_SETTINGS)
    with pytest.raises(
        NybbleError, match=r"down_proj\.weight: blocks of 64 in rows of 96; expected whole blocks in a row"
    ):
        ForeignCheckpoint(tmp_path / "q")


def test_what_is_foreign(make_tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    assert not is_foreign(make_tiny_model())
    assert not is_foreign(tmp_path)
    write_checkpoint(make_tiny_model(), tmp_path / "q", AWQ, lambda stem: Layer(symmetric=False))
    assert is_foreign(tmp_path / "q")


def test_a_digest_follows_the_file(make_tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    write_checkpoint(make_tiny_model(), tmp_path / "q", GPTQ, lambda stem: Layer())
    shutil.copytree(tmp_path / "q", tmp_path / "other")

    def digest(folder: Path) -> str:
        checkpoint = ForeignCheckpoint(folder)
        try:
            return checkpoint.digest
        finally:
            checkpoint.close()

    assert digest(tmp_path / "q") == digest(tmp_path / "q")
    path = tmp_path / "other" / "config.json"
    path.write_text(path.read_text() + " ")
    assert digest(tmp_path / "other") != digest(tmp_path / "q")


MISTAKES = [
    (GPTQ, {"quant_method": "hqq"}, "quant_method is 'hqq'; supported are gptq, awq, bitsandbytes"),
    (NF4_SETTINGS, {"bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type is 'fp4'; supported is nf4"),
    (NF4_SETTINGS, {"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage is 'bfloat16'"),
    (NF4_SETTINGS, {"load_in_4bit": 1}, "load_in_4bit is 1; expected true or false"),
    (NF4_SETTINGS, {"load_in_8bit": True}, "both of load_in_4bit and load_in_8bit"),
    (NF4_SETTINGS, {"load_in_4bit": False}, "neither of load_in_4bit and load_in_8bit"),
    (
        NF4_SETTINGS,
        {"load_in_4bit": False, "load_in_8bit": True},
        "is [2048, 1], expected [64, 64] for 8 bits",
    ),
    (GPTQ, {"bits": 5}, "bits is 5"),
    (GPTQ, {"bits": 8}, "qweight' is"),
    (GPTQ, {"group_size": 64}, "qzeros' is"),
    (GPTQ, {"dynamic": ["x"]}, "dynamic is"),
    (GPTQ, {"dynamic": {"(a+)+b": {}}}, "dynamic has the pattern '(a+)+b'"),
    (GPTQ, {"dynamic": {".*.*.*.*b": {}}}, "dynamic has the pattern"),
    (GPTQ, {"dynamic": {"[": {}}}, "dynamic has the pattern '['"),
    (GPTQ, {"dynamic": {"a": {"bits": "4"}}}, "dynamic: bits is '4'"),
    (GPTQ, {"dynamic": {"a": 4}}, "dynamic['a'] is 4"),
    (GPTQ, {"lm_head": 1}, "lm_head is 1"),
    (AWQ, {"bits": 8}, "bits is 8"),
    (AWQ, {"version": "gemv"}, "version is 'gemv'; supported is gemm"),
    (AWQ, {"zero_point": False}, "zero_point is False"),
    (AWQ, {"group_size": 0}, "group_size is 0"),
    (AWQ, {"group_size": 64}, "qzeros' is"),
    (AWQ, {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert is 'lm_head'"),
]


@pytest.fixture(scope="module")
def checkpoints(
    make_tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("foreign")
    for config in (GPTQ, AWQ):
        write_checkpoint(
            make_tiny_model(), folder / config["quant_method"], config, lambda stem: Layer(symmetric=False)
        )
    write_bnb_checkpoint(make_tiny_model(intermediate_size=128), folder / "bitsandbytes", NF4_SETTINGS)
    return {path.name: path for path in folder.iterdir()}


@pytest.mark.parametrize(("config", "change", "message"), MISTAKES, ids=lambda x: str(x)[:40])
def test_mistakes_are_named(
    checkpoints: dict[str, Path], tmp_path: Path, config: dict, change: dict, message: str
) -> None:
    folder = tmp_path / "q"
    shutil.copytree(checkpoints[config["quant_method"]], folder)
    path = folder / "config.json"
    data = json.loads(path.read_text()) | {"quantization_config": config | change}
    path.write_text(json.dumps(data))
    with pytest.raises(NybbleError, match=re.escape(message)) as caught:
        ForeignCheckpoint(folder)
    assert "\n" not in str(caught.value)
