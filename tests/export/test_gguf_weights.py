"""A GGUF file's tensors as they run, against what the gguf package decodes."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_models import write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st

from nybble.errors import ModelFormatError, NybbleError
from nybble.export.gguf_weights import GgufWeights
from nybble.models.gguf_source import GgufSource, open_gguf
from nybble.quant.packing import QuantizedTensor, quantize_head

KEPT = ("Q4_0", "Q4_1", "Q8_0")
TYPES = {
    "self_attn.q_proj": "Q4_1",
    "self_attn.k_proj": "Q4_0",
    "self_attn.v_proj": "Q8_0",
    "self_attn.o_proj": "Q5_1",
    "mlp.gate_proj": "F16",
    "mlp.up_proj": "F32",
    "mlp.down_proj": "Q4_0",
    "model.embed_tokens": "Q8_0",
    "lm_head": "Q4_1",
}


def type_of(name: str) -> str:
    return next(kind for part, kind in TYPES.items() if part in name)


@pytest.fixture(scope="module")
def path(make_tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama, whose q and k are reordered in the file (heads of 32 rows, so that parts of one are read),
    with biases and matrices of all sorts."""
    folder = make_tiny_model("llama", attention_bias=True, head_dim=32)
    return write_gguf(folder, tmp_path_factory.mktemp("gguf") / "mixed.gguf", type_of)


@pytest.fixture(scope="module")
def source(path: Path) -> Iterator[GgufSource]:
    with open_gguf(path, "mixed.gguf") as source:
        yield source


@pytest.mark.usefixtures("piece_elements")
def test_exact_types_keep_their_weights_and_others_have_8_bits(source: GgufSource) -> None:
    expected = {name: source.tensor(name) for name in source.spec.tensors()}
    weights = GgufWeights(source)
    for name, shape in source.spec.tensors().items():
        found = weights.tensor(name)
        if len(shape) == 1:
            assert np.array_equal(found, expected[name])  # type: ignore[arg-type]
            continue
        assert isinstance(found, QuantizedTensor)
        kind = type_of(name)
        if kind in KEPT and "lm_head" not in name:
            assert np.array_equal(found.dequantize(), expected[name]), name
            assert (found.bits, found.minima is None) == (8 if kind == "Q8_0" else 4, kind != "Q4_1")
        else:
            rounded = quantize_head(expected[name])
            assert (found.bits, found.zeros, found.minima) == (8, None, None)
            assert np.array_equal(found.packed, rounded.packed)
            assert np.array_equal(found.scales, rounded.scales)
        assert (found.group_size, found.permutation) == (32, None)


def test_one_line_says_how_many_are_rounded(source: GgufSource, caplog: Any) -> None:
    with caplog.at_level(logging.INFO, "nybble"):
        GgufWeights(source)
    assert caplog.messages == [
        "mixed.gguf: 6 of 14 linear layers are rounded to 8 bits: 2 in F16, 2 in F32, 2 in Q5_1"
    ]


def test_no_line_where_none_is(make_tiny_model: Callable[..., Path], tmp_path: Path, caplog: Any) -> None:
    path = write_gguf(make_tiny_model(), tmp_path / "m.gguf", lambda name: "Q4_0")
    with open_gguf(path, "m") as source, caplog.at_level(logging.INFO, "nybble"):
        GgufWeights(source)
    assert caplog.messages == []


def test_damage_is_found_where_it_is(path: Path, tmp_path: Path) -> None:
    content = bytearray(path.read_bytes())
    with open_gguf(path, "m") as source:
        name = next(n for n in source.spec.tensors() if source.type_of(n) == "Q4_0")
        entry = source._entry(name)
    content[entry.offset : entry.offset + 2] = np.array([np.nan], np.float16).tobytes()
    (tmp_path / "m.gguf").write_bytes(content)
    with open_gguf(tmp_path / "m.gguf", "m") as source:
        weights = GgufWeights(source)
        with pytest.raises(ModelFormatError, match=rf"m: {name}: holds a NaN"):
            weights.tensor(name)
        with pytest.raises(ModelFormatError, match="no tensor"):
            weights.tensor("model.layers.9.mlp.up_proj.weight")


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_changed_file_gives_tensors_or_one_error(
    path: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    changed = tmp_path_factory.getbasetemp() / "changed weights.gguf"
    changed.write_bytes(content)
    try:
        with open_gguf(changed, "m") as source:
            weights = GgufWeights(source)
            for name, shape in source.spec.tensors().items():
                tensor = weights.tensor(name)
                values = tensor if isinstance(tensor, np.ndarray) else tensor.dequantize()
                assert values.shape == shape
                assert np.isfinite(values).all()
    except NybbleError:
        return
