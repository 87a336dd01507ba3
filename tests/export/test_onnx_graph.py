"""The ONNX half on disk: sound ONNX, and read back exactly; damage is found before anything is used."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from nybble.errors import ModelFormatError, UnsupportedModelError
from nybble.export.onnx_graph import build_decoder
from nybble.export.onnx_reader import OnnxWeights
from nybble.export.onnx_writer import ALIGNMENT, write_onnx
from nybble.export.weights import LogicalTensor
from nybble.models.spec import ModelSpec, RopeSpec
from nybble.quant.packing import QuantizedTensor, quantize_head


@dataclass
class Weights:
    spec: ModelSpec
    tensors: dict[str, LogicalTensor]

    def tensor(self, name: str) -> LogicalTensor:
        return self.tensors[name]


def make_spec(**changes: Any) -> ModelSpec:
    sizes: dict[str, Any] = {
        "model_type": "qwen3",
        "vocab_size": 70,
        "hidden_size": 80,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 12,
        "max_position": 128,
        "norm_eps": 1e-6,
        "rope": RopeSpec(theta=1e6, rotary_dim=12, scaling="yarn", factor=4.0, original_max_position=32),
        "qkv_bias": True,
        "mlp_bias": True,
        "qk_norm": True,
        "sliding_windows": (None, 20),
    }
    return ModelSpec(**{**sizes, **changes})


def random_tensor(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.float32]]:
    return rng.normal(size=shape).astype(np.float32)


def float_weights(**changes: Any) -> Weights:
    spec, rng = make_spec(**changes), np.random.default_rng(1)
    return Weights(spec, {name: random_tensor(rng, shape) for name, shape in spec.tensors().items()})


def quantized_weights(
    bits: int = 4, group_size: int = 32, symmetric: bool = True, permuted: bool = False, **changes: Any
) -> Weights:
    """Random integers, scales and zero points: nothing a quantizer would never give."""
    weights, rng = float_weights(**changes), np.random.default_rng(2)
    heads = (weights.spec.embedding_name, weights.spec.head_name)
    for name, tensor in weights.tensors.items():
        if isinstance(tensor, QuantizedTensor) or tensor.ndim == 1:
            continue
        if name in heads:
            weights.tensors[name] = quantize_head(tensor)
            continue
        out, columns = tensor.shape
        size = columns if group_size == -1 else group_size
        groups = -(-columns // size)
        weights.tensors[name] = QuantizedTensor(
            packed=rng.integers(0, 256, (out, columns * bits // 8), np.uint8),
            scales=rng.uniform(0.001, 0.1, (out, groups)).astype(np.float16),
            zeros=None if symmetric else rng.integers(1, 1 << bits, (out, groups)).astype(np.uint8),
            bits=bits,
            group_size=size,
            in_features=columns,
            permutation=rng.permutation(columns).astype(np.int32) if permuted else None,
        )
    return weights


def assert_equal(found: LogicalTensor, expected: LogicalTensor) -> None:
    if not isinstance(expected, QuantizedTensor):
        assert not isinstance(found, QuantizedTensor)
        np.testing.assert_array_equal(found, expected, strict=True)
        return
    assert isinstance(found, QuantizedTensor)
    kinds = ("bits", "group_size", "in_features")
    assert [getattr(found, k) for k in kinds] == [getattr(expected, k) for k in kinds]
    for part in ("packed", "scales", "zeros", "permutation"):
        one, other = getattr(found, part), getattr(expected, part)
        assert (one is None) == (other is None), part
        if other is not None:
            np.testing.assert_array_equal(one, other, strict=True)


FORMS: dict[str, Callable[[], Weights]] = {
    "float": float_weights,
    "float tied": lambda: float_weights(tied_embeddings=True),
    "4 bits": quantized_weights,
    "4 bits tied, asymmetric": lambda: quantized_weights(symmetric=False, tied_embeddings=True),
    "8 bits, group 64, permuted": lambda: quantized_weights(8, 64, permuted=True),
    "4 bits, one group, asymmetric, permuted": lambda: quantized_weights(4, -1, False, True),
    "8 bits, group 128, asymmetric": lambda: quantized_weights(8, 128, False),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("piece_elements")
def test_what_is_written_is_read_back_exactly(form: str, tmp_path: Path) -> None:
    weights = FORMS[form]()
    graph, _ = write_onnx(weights, tmp_path / "onnx")
    found = OnnxWeights(graph)
    assert found.spec == weights.spec
    for name in weights.spec.tensors():
        assert_equal(found.tensor(name), weights.tensor(name))


@pytest.mark.parametrize("form", FORMS)
def test_onnx_checker_passes(form: str, tmp_path: Path) -> None:
    graph, _ = write_onnx(FORMS[form](), tmp_path)
    onnx.checker.check_model(str(graph), full_check=True)


def test_layers_quantized_unlike_each_other_are_kept_apart(tmp_path: Path) -> None:
    weights, other = quantized_weights(4, 32), quantized_weights(8, 64)
    name = weights.spec.linears(0)[1].name
    weights.tensors[name] = other.tensor(name)
    found = OnnxWeights(write_onnx(weights, tmp_path)[0])
    for linear in weights.spec.linears(0):
        assert_equal(found.tensor(linear.name), weights.tensor(linear.name))


def external_entries(graph: Path) -> dict[str, dict[str, str]]:
    model = onnx.load(graph, load_external_data=False)
    return {t.name: {e.key: e.value for e in t.external_data} for t in model.graph.initializer}


def test_weights_lie_in_one_file_at_page_boundaries_and_a_tied_head_once(tmp_path: Path) -> None:
    graph, data = write_onnx(quantized_weights(tied_embeddings=True), tmp_path)
    entries = external_entries(graph)
    assert {e["location"] for e in entries.values()} == {data.name}
    assert all(int(e["offset"]) % ALIGNMENT == 0 for e in entries.values())
    assert [name for name in entries if "embed" in name or "head" in name] == [
        "model.embed_tokens.qweight",
        "model.embed_tokens.scales",
    ]
    assert max(int(e["offset"]) + int(e["length"]) for e in entries.values()) == data.stat().st_size


def test_an_embedding_with_zero_points_is_refused() -> None:
    weights = quantized_weights()
    name = weights.spec.embedding_name
    tensor = weights.tensor(name)
    assert isinstance(tensor, QuantizedTensor)
    weights.tensors[name] = replace(tensor, zeros=np.ones_like(tensor.scales, np.uint8))
    with pytest.raises(UnsupportedModelError, match="embed_tokens"):
        build_decoder(weights)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    write_onnx(quantized_weights(4, 32, False, True), folder)
    return folder


def damage(folder: Path, change: Callable[[onnx.ModelProto], None]) -> None:
    model = onnx.load(folder / "decoder.onnx", load_external_data=False)
    change(model)
    (folder / "decoder.onnx").write_bytes(model.SerializeToString())


def set_entry(model: onnx.ModelProto, key: str, value: str) -> None:
    entry = next(e for e in model.graph.initializer[3].external_data if e.key == key)
    entry.value = value


def set_metadata(model: onnx.ModelProto, key: str, change: Callable[[str], str]) -> None:
    entry = next(e for e in model.metadata_props if e.key == key)
    entry.value = change(entry.value)


def set_spec(model: onnx.ModelProto, **changes: Any) -> None:
    set_metadata(model, "nybble.spec", lambda text: json.dumps({**json.loads(text), **changes}))


def set_rope(model: onnx.ModelProto, **changes: Any) -> None:
    set_metadata(
        model,
        "nybble.spec",
        lambda text: json.dumps((spec := json.loads(text)) | {"rope": spec["rope"] | changes}),
    )


def drop_metadata(model: onnx.ModelProto) -> None:
    del model.metadata_props[:]


def change_block(model: onnx.ModelProto) -> None:
    node = next(n for n in model.graph.node if n.op_type == "MatMulNBits")
    next(a for a in node.attribute if a.name == "block_size").i = 64


def hide_external(model: onnx.ModelProto) -> None:
    node = next(n for n in model.graph.node if n.op_type == "Constant")
    node.attribute[0].t.CopyFrom(model.graph.initializer[0])


MIXTURE = {
    "layers": [1],
    "num_experts": 8,
    "experts_per_token": 2,
    "intermediate_size": 48,
    "normalized": True,
    "shared_intermediate_size": 0,
    "names": "qwen",
}
DAMAGES: dict[str, tuple[Callable[[onnx.ModelProto], None], str]] = {
    "another folder": (lambda m: set_entry(m, "location", "../weights.bin"), "same folder"),
    "an absolute path": (lambda m: set_entry(m, "location", "/etc/passwd"), "same folder"),
    "a file that is not there": (lambda m: set_entry(m, "location", "other.bin"), "other.bin.: No such"),
    "past the end": (lambda m: set_entry(m, "offset", str(1 << 40)), "past the file's"),
    "a negative offset": (lambda m: set_entry(m, "offset", "-4096"), "decoder.onnx|past"),
    "an offset that is no number": (lambda m: set_entry(m, "offset", "x"), "decoder.onnx"),
    "another length": (lambda m: set_entry(m, "length", "8"), "has 8 bytes"),
    "no metadata": (drop_metadata, "not written by nybble"),
    "a newer format": (lambda m: set_metadata(m, "nybble.format", lambda _: "99"), "format version 99"),
    "tensors that are not JSON": (
        lambda m: set_metadata(m, "nybble.tensors", lambda _: "{"),
        "nybble.tensors",
    ),
    "a layer too many": (
        lambda m: set_spec(m, num_layers=3, sliding_windows=[None] * 3),
        r"layers\.2\..* missing",
    ),
    "a billion layers": (lambda m: set_spec(m, num_layers=1 << 30, sliding_windows=[]), "missing"),
    "a size that is text": (lambda m: set_spec(m, hidden_size="80"), "hidden_size is '80'"),
    "a size below zero": (lambda m: set_spec(m, head_dim=-12), "head_dim is -12"),
    "another size": (lambda m: set_spec(m, intermediate_size=64), "has shape"),
    "a factor too few": (
        lambda m: set_rope(m, scaling="longrope", short_factor=[1.0] * 6, long_factor=[1.0] * 5),
        "factor list is",
    ),
    "a factor of nothing": (
        lambda m: set_rope(m, scaling="longrope", short_factor=[0.0] * 6, long_factor=[1.0] * 6),
        "factor list is",
    ),
    "a factor that is text": (lambda m: set_rope(m, short_factor=["1"] * 6), "short_factor is"),
    "a mixture of nothing": (lambda m: set_spec(m, mixture=7), "no mixture of experts"),
    "a mixture of layers that are not there": (
        lambda m: set_spec(m, mixture={**MIXTURE, "layers": [2]}),
        r"layers is \(2,\)",
    ),
    "a billion experts": (lambda m: set_spec(m, mixture={**MIXTURE, "num_experts": 1 << 30}), "num_experts"),
    "more experts than tensors": (lambda m: set_spec(m, mixture=MIXTURE), "missing"),
    "a token with more experts than there are": (
        lambda m: set_spec(m, mixture={**MIXTURE, "experts_per_token": 9}),
        "experts_per_token is 9; expected 1 to 8",
    ),
    "a field too many": (lambda m: set_spec(m, colour=1), "colour missing or unknown"),
    "an operator with another block": (change_block, "block_size"),
    "data outside a constant": (hide_external, "outside the graph"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_graph_is_refused_in_one_line(case: str, written: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(written, tmp_path / "onnx")
    change, message = DAMAGES[case]
    damage(folder, change)
    with pytest.raises(ModelFormatError, match=message) as caught:
        OnnxWeights(folder / "decoder.onnx")
    assert "\n" not in str(caught.value)


def test_a_graph_from_before_a_field_was_there_has_its_default(written: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(written, tmp_path / "onnx")
    newer = {"norm_placement", "norm_offset", "residual_scale", "logit_scale", "window_rope", "mixture"}

    def older(text: str) -> str:
        return json.dumps({key: value for key, value in json.loads(text).items() if key not in newer})

    damage(folder, lambda model: set_metadata(model, "nybble.spec", older))
    assert OnnxWeights(folder / "decoder.onnx").spec == OnnxWeights(written / "decoder.onnx").spec


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, b"GGUF"])
def test_what_is_no_onnx_file_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "decoder.onnx").write_bytes(content)
    with pytest.raises(ModelFormatError, match=r"decoder\.onnx"):
        OnnxWeights(tmp_path / "decoder.onnx")
    with pytest.raises(ModelFormatError, match=r"other.onnx.*cannot be read"):
        OnnxWeights(tmp_path / "other.onnx")


def test_truncated_weights_are_refused(written: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(written, tmp_path / "onnx")
    data = (folder / "weights.bin").read_bytes()
    (folder / "weights.bin").write_bytes(data[:-1])
    with pytest.raises(ModelFormatError, match=r"weights.bin: .* past the file's"):
        OnnxWeights(folder / "decoder.onnx")


def test_a_scale_that_is_not_finite_names_its_tensor(written: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(written, tmp_path / "onnx")
    name = "model.layers.0.self_attn.qkv_proj.scales"
    entries = external_entries(folder / "decoder.onnx")
    scales = next(n for n in entries if n.endswith("o_proj.scales"))
    with (folder / "weights.bin").open("r+b") as file:
        file.seek(int(entries[scales]["offset"]))
        file.write(np.array([np.nan], "<f4").tobytes())
    weights = OnnxWeights(folder / "decoder.onnx")
    with pytest.raises(ModelFormatError, match="o_proj"):
        weights.tensor("model.layers.0.self_attn.o_proj.weight")
    assert name not in entries or weights.tensor("model.norm.weight").shape == (80,)
