"""GGUF files that no model is made of: the errors a user can meet."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_gguf import HIDDEN, INNER, tiny

from nybble.errors import ModelFormatError, NybbleError, UnsupportedModelError
from nybble.models.gguf_source import open_gguf


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope__scaling__type": "longrope"}, "'longrope'; supported: none, linear, yarn"),
        ({"rope__dimension_count": 4}, "only 8, a head, is supported"),
        ({"attention__value_length": 16}, "only 8, a head, is supported"),
        ({"expert_count": 8}, r"llama\.expert_count is set"),
        ({"expert_count": [8, 8]}, r"llama\.expert_count is set"),
        ({"logit_scale": 0.5}, r"llama\.logit_scale is set"),
        ({"attention__head_count_kv": [2, 1]}, "differs between layers"),
    ],
)
def test_features_that_are_not_run(write: Callable[..., Path], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        open_gguf(write(*tiny(**changes)), "m")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_count": None}, r"lacks llama\.block_count"),
        ({"block_count": "two"}, "'two'; expected a whole number"),
        ({"attention__head_count": 0}, "is 0"),
        ({"attention__head_count": 5}, "no multiple of 5 heads"),
        ({"attention__layer_norm_rms_epsilon": float("nan")}, "expected a finite number"),
        ({"embedding_length": 64}, "shape"),
        ({"block_count": 3}, r"'blk\.2\..*' .* is missing"),
    ],
)
def test_metadata_that_contradicts_the_file(
    write: Callable[..., Path], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelFormatError, match=message):
        open_gguf(write(*tiny(**changes)), "m")


def test_other_architectures_are_named(write: Callable[..., Path]) -> None:
    metadata, tensors = tiny("mamba")
    with pytest.raises(UnsupportedModelError, match="'mamba'; supported: llama, qwen2, qwen3"):
        open_gguf(write(metadata, tensors, "mamba"), "m")


def test_split_files_are_refused(write: Callable[..., Path]) -> None:
    metadata, tensors = tiny()
    with pytest.raises(UnsupportedModelError, match="one of 3 parts of a split GGUF"):
        open_gguf(write(metadata | {"split.count": 3}, tensors), "m")


def test_tensors_that_are_missing_misshapen_or_extra(write: Callable[..., Path]) -> None:
    metadata, tensors = tiny()
    name = "blk.1.attn_k.weight"
    with pytest.raises(ModelFormatError, match=r"blk\.1\.attn_k\.weight.*is missing"):
        open_gguf(write(metadata, {n: t for n, t in tensors.items() if n != name}), "m")
    with pytest.raises(ModelFormatError, match=r"has shape \(32, 32\); expected \(16, 32\)"):
        open_gguf(write(metadata, tensors | {name: np.zeros((32, 32), np.float32)}), "m")
    extra = {"blk.1.attn_q.bias": np.zeros(32, np.float32)}
    with pytest.raises(UnsupportedModelError, match=r"'blk\.1\.attn_q\.bias' is not part"):
        open_gguf(write(metadata, tensors | extra), "m")


def test_a_tensor_type_that_is_not_read_is_named(write: Callable[..., Path]) -> None:
    metadata, tensors = tiny()
    tensors["blk.0.ffn_up.weight"] = ("IQ4_NL", np.zeros((INNER, 18), np.uint8))
    with pytest.raises(UnsupportedModelError, match=r"'blk\.0\.ffn_up\.weight' has type IQ4_NL"):
        open_gguf(write(metadata, tensors), "m")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("quantized", [False, True])
def test_values_that_are_not_finite_are_found(
    write: Callable[..., Path], value: float, quantized: bool
) -> None:
    metadata, tensors = tiny()
    values = tensors["blk.1.ffn_down.weight"]
    if quantized:
        blocks = np.zeros((HIDDEN, INNER // 32 * 34), np.uint8)
        blocks[-1, :2] = np.array([value], np.float16).view(np.uint8)
        blocks[-1, 2] = 1
        tensors["blk.1.ffn_down.weight"] = ("Q8_0", blocks)
    else:
        values[-1, -1] = value
    with (
        open_gguf(write(metadata, tensors), "m") as source,
        pytest.raises(ModelFormatError, match=r"m: tensor 'blk\.1\.ffn_down\.weight' holds a NaN"),
    ):
        source.tensor("model.layers.1.mlp.down_proj.weight")


def test_an_unknown_tensor_name_is_an_error(write: Callable[..., Path]) -> None:
    with (
        open_gguf(write(*tiny()), "m") as source,
        pytest.raises(ModelFormatError, match=r"no tensor 'model\.layers\.9"),
    ):
        source.tensor("model.layers.9.mlp.down_proj.weight")


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match="m: cannot be opened: No such file"):
        open_gguf(tmp_path / "none.gguf", "m")
    with pytest.raises(ModelFormatError, match="m: cannot be read: Is a directory"):
        open_gguf(tmp_path, "m")


@pytest.fixture(scope="module")
def sound_file(tmp_path_factory: pytest.TempPathFactory, gguf_samples: ModuleType) -> bytes:
    path: Path = gguf_samples.write_model(tmp_path_factory.mktemp("sound") / "m.gguf", "llama", *tiny())
    return path.read_bytes()


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_changed_file_opens_or_gives_one_error(
    sound_file: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Whatever is changed, what opens gives tensors of the spec's shapes, and what does not is one error."""
    content = bytearray(sound_file)
    header = content.index(b"output_norm.weight") + 400
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, header))
        content[at] = data.draw(st.integers(0, 255) | st.sampled_from([0, 1, content[at] ^ 1, 128, 255]))
    path = tmp_path_factory.getbasetemp() / "changed.gguf"
    path.write_bytes(content[: len(content) - data.draw(st.sampled_from([0, 0, 0, 1, 5000]))])
    try:
        with open_gguf(path, "m") as source:
            for name, shape in source.spec.tensors().items():
                assert source.tensor(name).shape == shape
    except NybbleError:
        return
