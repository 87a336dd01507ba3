"""Checkpoints that others made mean the weights that they say."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import Layer, write_checkpoint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from nybble.errors import NybbleError
from nybble.export.foreign import ForeignCheckpoint, is_foreign
from nybble.quant.packing import QuantizedTensor, quantize_head

GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ: dict[str, Any] = {
    "quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
}  # fmt: skip
ENDS = ("model.embed_tokens.weight", "lm_head.weight")


def check_weights(folder: Path, meant: dict[str, np.ndarray], rounded: tuple[str, ...] = ()) -> None:
    """Every tensor means what was written; those `rounded` to 8 bits as `quantize_head` says."""
    checkpoint = ForeignCheckpoint(folder)
    try:
        for name, (stored, begin, end) in checkpoint.spec.stored_rows().items():
            found, expected = checkpoint.weights.tensor(name), meant[stored][begin:end]
            if name in ENDS or name in rounded:
                expected = quantize_head(expected).dequantize()
            values = found.dequantize() if isinstance(found, QuantizedTensor) else found
            np.testing.assert_array_equal(values, expected, err_msg=name)
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
    (GPTQ, {"quant_method": "hqq"}, "quant_method is 'hqq'; supported are gptq, awq"),
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
    return {config["quant_method"]: folder / config["quant_method"] for config in (GPTQ, AWQ)}


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


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
KEYS = sorted(
    {*GPTQ, *AWQ, "dynamic", "lm_head", "checkpoint_format", "modules_to_not_convert", "pack_dtype"}
)


def read_all(folder: Path) -> None:
    """Opens a checkpoint and reads every tensor, or refuses with one line."""
    try:
        checkpoint = ForeignCheckpoint(folder)
        try:
            for name in checkpoint.spec.tensors():
                checkpoint.weights.tensor(name)
        finally:
            checkpoint.close()
    except NybbleError as error:
        if "\n" in str(error):
            pytest.fail(str(error))


@pytest.mark.parametrize("method", ["gptq", "awq"])
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_settings_open_or_are_refused(
    checkpoints: dict[str, Path], method: str, data: st.DataObject
) -> None:
    changes = data.draw(st.dictionaries(st.sampled_from(KEYS), json_values, min_size=1, max_size=3))
    path = checkpoints[method] / "config.json"
    before = path.read_text()
    config = json.loads(before)
    changed = config | {"quantization_config": config["quantization_config"] | changes}
    try:
        path.write_text(json.dumps(changed))
        read_all(checkpoints[method])
    finally:
        path.write_text(before)


@pytest.mark.parametrize("method", ["gptq", "awq"])
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_opens_or_is_refused(
    checkpoints: dict[str, Path], method: str, data: st.DataObject
) -> None:
    """Bytes changed, mostly in the header, and files cut off."""
    path = checkpoints[method] / "model.safetensors"
    before = path.read_bytes()
    header = 8 + int.from_bytes(before[:8], "little")
    damaged = bytearray(before)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, header - 1) | st.integers(0, len(before) - 1))
        damaged[at] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del damaged[data.draw(st.integers(0, len(damaged))) :]
    try:
        path.write_bytes(damaged)
        read_all(checkpoints[method])
    finally:
        path.write_bytes(before)
