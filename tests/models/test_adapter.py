"""A merged LoRA against its formula; `test_interop_peft.py` compares with PEFT itself."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from nybble.errors import ModelFormatError, NybbleError, UnsupportedModelError
from nybble.models import open_source

Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.1.mlp.down_proj"
SHAPES = {Q: (64, 64), DOWN: (64, 96)}
# As PEFT 0.19 writes it.
CONFIG: dict[str, Any] = {
    "alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None, "auto_mapping": None,
    "base_model_name_or_path": "some/model", "bias": "none", "corda_config": None, "eva_config": None,
    "ensure_weight_tying": False, "exclude_modules": None, "fan_in_fan_out": False, "inference_mode": True,
    "init_lora_weights": True, "layer_replication": None, "layers_pattern": None, "layers_to_transform": None,
    "loftq_config": {}, "lora_alpha": 12, "lora_bias": False, "lora_dropout": 0.1, "megatron_config": None,
    "megatron_core": "megatron.core", "modules_to_save": None, "peft_type": "LORA", "peft_version": "0.19.0",
    "qalora_group_size": 16, "r": 4, "rank_pattern": {}, "revision": None,
    "target_modules": ["q_proj", "down_proj"], "target_parameters": None, "task_type": "CAUSAL_LM",
    "trainable_token_indices": None, "use_dora": False, "use_qalora": False, "use_rslora": False,
}  # fmt: skip


def write_adapter(
    folder: Path,
    shapes: dict[str, tuple[int, int]] | None = None,
    ranks: dict[str, int] | None = None,
    dtype: Any = np.float32,
    **changes: Any,
) -> dict[str, tuple[NDArray[Any], NDArray[Any]]]:
    """Random A and B of modules [out, in]; returns them in float64."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **changes}))
    rng, tensors, found = np.random.default_rng(3), {}, {}
    for module, (out, columns) in (shapes or SHAPES).items():
        rank = (ranks or {}).get(module, 4)
        a, b = rng.normal(size=(rank, columns)).astype(dtype), rng.normal(size=(out, rank)).astype(dtype)
        tensors |= {
            f"base_model.model.{module}.lora_A.weight": a,
            f"base_model.model.{module}.lora_B.weight": b,
        }
        found[module] = (a.astype(np.float64), b.astype(np.float64))
    save_file(tensors, folder / "adapter_model.safetensors")
    return found


def check(model: Path, folder: Path, expected: dict[str, NDArray[np.float64]]) -> None:
    """`expected` is what is added, by the names of the checkpoint's tensors."""
    source, plain = open_source(model, folder), open_source(model)
    try:
        changed = set()
        for name, (stored, begin, end) in source.spec.stored_rows().items():
            before, after = plain.tensor(name), source.tensor(name)
            assert after.dtype == np.float32
            if stored.removesuffix(".weight") not in expected:
                np.testing.assert_array_equal(after, before)
                continue
            changed.add(stored.removesuffix(".weight"))
            delta = expected[stored.removesuffix(".weight")][begin:end]
            assert np.abs(delta).max() > 0.1
            np.testing.assert_allclose(after, before + delta, rtol=1e-5, atol=1e-5)
        assert changed == set(expected)
    finally:
        source.close()
        plain.close()


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("stabilized", [False, True])
def test_the_product_times_alpha_over_rank_is_added(
    make_tiny_model: Callable[..., Path], tmp_path: Path, dtype: Any, stabilized: bool
) -> None:
    parts = write_adapter(tmp_path / "a", dtype=dtype, use_rslora=stabilized)
    scale = 12 / (math.sqrt(4) if stabilized else 4)
    check(make_tiny_model(), tmp_path / "a", {module: scale * b @ a for module, (a, b) in parts.items()})


def test_patterns_of_ranks_and_weights(make_tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    other = "model.layers.1.self_attn.q_proj"
    shapes = {**SHAPES, other: (64, 64)}
    parts = write_adapter(
        tmp_path / "a",
        shapes,
        {Q: 2, other: 2},
        rank_pattern={"q_proj": 2},
        alpha_pattern={
            "^model.layers.0.self_attn.q_proj": 30,
            "^down_proj": 99,
            "roj": 7,
            "self_attn.q_proj": 5,
        },
    )
    scales = {Q: 30 / 2, other: 5 / 2, DOWN: 12 / 4}
    check(
        make_tiny_model(),
        tmp_path / "a",
        {module: scales[module] * b @ a for module, (a, b) in parts.items()},
    )


def test_rows_of_a_fused_layer(make_tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    shapes = {"model.layers.0.self_attn.qkv_proj": (128, 64), "model.layers.1.mlp.gate_up_proj": (192, 64)}
    parts = write_adapter(tmp_path / "a", shapes)
    check(make_tiny_model("phi3"), tmp_path / "a", {module: 3 * b @ a for module, (a, b) in parts.items()})


def test_a_layer_that_comes_with_the_adapter_replaces_the_models(
    make_tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = make_tiny_model()
    a, b = write_adapter(tmp_path / "a", {"lm_head": (512, 64)})["lm_head"]
    path = tmp_path / "a" / "adapter_model.safetensors"
    tensors = load_file(path)
    base = np.random.default_rng(9).normal(size=(512, 64)).astype(np.float32)
    save_file({**tensors, "base_model.model.lm_head.base_layer.weight": base}, path)
    source = open_source(model, tmp_path / "a")
    np.testing.assert_allclose(source.tensor("lm_head.weight"), base + 3 * b @ a, rtol=1e-5, atol=1e-5)
    source.close()
    save_file({**tensors, "base_model.model.lm_head.base_layer.weight": base[1:]}, path)
    assert "lm_head.base_layer.weight is [511, 64], expected [512, 64]" in refused(model, tmp_path / "a")


def test_a_head_of_its_own(make_tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    parts = write_adapter(tmp_path / "a", {"lm_head": (512, 64)})
    a, b = parts["lm_head"]
    check(make_tiny_model(), tmp_path / "a", {"lm_head": 3 * b @ a})
    with pytest.raises(UnsupportedModelError, match="adapts 'lm_head'"):
        open_source(make_tiny_model(tie_word_embeddings=True), tmp_path / "a")


def test_origin_and_digest_name_both(make_tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    model, digests = make_tiny_model(), set()
    write_adapter(tmp_path / "my-lora")
    for change in ("none", "config", "weights"):
        if change == "config":
            write_adapter(tmp_path / "my-lora", lora_alpha=13)
        if change == "weights":
            path = tmp_path / "my-lora" / "adapter_model.safetensors"
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
        source = open_source(model, tmp_path / "my-lora")
        assert source.origin == f"{model.name} + my-lora"
        digests.add(source.digest)
        source.close()
    plain = open_source(model)
    assert len(digests | {plain.digest}) == 4
    plain.close()


UNSUPPORTED = [
    ({"peft_type": "IA3"}, "peft_type is 'IA3'; supported: LORA"),
    ({"use_dora": True}, "use_dora is True"),
    ({"fan_in_fan_out": True}, "fan_in_fan_out is True"),
    ({"bias": "lora_only"}, "bias is 'lora_only'"),
    ({"lora_bias": True}, "lora_bias is True"),
    ({"modules_to_save": ["lm_head"]}, 'modules_to_save is ["lm_head"]'),
    ({"layer_replication": [[0, 2]]}, "layer_replication"),
    ({"target_parameters": ["experts"]}, "target_parameters"),
    ({"trainable_token_indices": [3]}, "trainable_token_indices"),
    ({"alora_invocation_tokens": [3]}, "alora_invocation_tokens"),
    ({"use_qalora": True}, "use_qalora"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
    ({"something_newer": 1}, "something_newer is 1, which is not supported"),
    ({"rank_pattern": {"(a+)+$": 2}}, "rank_pattern has '(a+)+$'"),
    ({"alpha_pattern": {"layers.*q_proj": 2}}, "alpha_pattern has 'layers.*q_proj'"),
]
MALFORMED = [
    ({"peft_type": 3}, "peft_type is 3"),
    ({"r": 0}, "r is 0"),
    ({"r": "4"}, "r is '4'"),
    ({"lora_alpha": "much"}, "lora_alpha is 'much'"),
    ({"use_rslora": 1}, "use_rslora is 1"),
    ({"rank_pattern": [1]}, "rank_pattern is [1]"),
    ({"rank_pattern": {"q_proj": 0}}, "rank_pattern.q_proj is 0"),
    ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern.q_proj is None"),
    ({"r": 5}, f"{Q}.lora_A.weight is [4, 64], expected [5, 64]"),
]


@pytest.mark.parametrize(("changes", "named"), [*UNSUPPORTED, *MALFORMED], ids=str)
def test_what_cannot_be_merged_is_refused_by_name(
    make_tiny_model: Callable[..., Path], tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    write_adapter(tmp_path / "a", **changes)
    kind = UnsupportedModelError if (changes, named) in UNSUPPORTED else ModelFormatError
    with pytest.raises(kind) as caught:
        open_source(make_tiny_model(), tmp_path / "a")
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def refused(model: Path, folder: Path) -> str:
    with pytest.raises(NybbleError) as caught:
        open_source(model, folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_tensors_that_fit_no_layer_are_refused(make_tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    model, folder = make_tiny_model(), tmp_path / "a"
    assert "no such folder" in refused(model, folder)
    write_adapter(folder, {"model.layers.2.self_attn.q_proj": (64, 64)})
    assert "adapts 'model.layers.2.self_attn.q_proj'" in refused(model, folder)
    write_adapter(folder, {"model.embed_tokens": (512, 64)})
    assert "adapts 'model.embed_tokens'" in refused(model, folder)
    write_adapter(folder, {Q: (63, 64)})
    assert f"{Q}.lora_B.weight is [63, 4], expected [64, 4]" in refused(model, folder)
    write_adapter(folder)
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    gone = f"base_model.model.{Q}.lora_B.weight"
    save_file({name: value for name, value in tensors.items() if name != gone}, path)
    assert f"{gone} is missing" in refused(model, folder)
    save_file({**tensors, f"base_model.model.{Q}.lora_magnitude_vector": tensors[gone]}, path)
    assert "has a tensor 'base_model.model.model.layers.0.self_attn.q_proj.lora_ma" in refused(model, folder)
    save_file({**tensors, gone: tensors[gone].astype(np.int32)}, path)
    assert "is I32, expected F32, F16 or BF16" in refused(model, folder)
    path.unlink()
    assert "adapter_model.safetensors: cannot be opened" in refused(model, folder)
    (folder / "adapter_model.bin").write_bytes(b"")
    assert "a pickle" in refused(model, folder)


def test_a_value_that_is_not_finite_is_named(make_tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    write_adapter(tmp_path / "a")
    path = tmp_path / "a" / "adapter_model.safetensors"
    tensors = load_file(path)
    tensors[f"base_model.model.{Q}.lora_A.weight"][0, 0] = np.nan
    save_file(tensors, path)
    source = open_source(make_tiny_model(), tmp_path / "a")
    with pytest.raises(ModelFormatError, match="q_proj"):
        source.tensor(f"{Q}.weight")
    source.close()
