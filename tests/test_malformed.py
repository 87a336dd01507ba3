"""Whatever is wrong with a file, reading it costs little and ends in what was asked for or in one line."""

import json
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bnb_checkpoints import INT8_SETTINGS, NF4_SETTINGS, write_bnb_checkpoint
from checkpoints import Layer, write_checkpoint
from decoders import load, quantized
from gguf_models import write_gguf
from hypothesis import strategies as st
from malformed import (
    CASES,
    ODD_VALUES,
    changed_bytes,
    changed_json,
    changed_safetensors,
    check,
)

from nybble.errors import ModelFormatError
from nybble.export import open_artifact
from nybble.export.foreign import ForeignCheckpoint
from nybble.export.gguf_weights import GgufWeights
from nybble.export.weights import LogicalWeights
from nybble.kvcache import KvCache
from nybble.models.gguf_source import GgufSource
from nybble.models.open import open_source
from nybble.quantization import quantize
from nybble.runtime.cpu_executor import CpuExecutor
from nybble.runtime.packed_cache import open_packed
from nybble.runtime.packed_file import UnusableFile, write_packed
from nybble.runtime.packed_weights import FreshlyPacked
from nybble.runtime.prefix_file import write_prefix
from nybble.runtime.saved_prefix import load_prefix, prefix_key

DIGEST = "3c" * 32
GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 32,
    "desc_act": True,
    "sym": False,
    "dynamic": {"-:a": {}},
}
BNB = ("nf4", "nf4, double", "int8")
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


@pytest.fixture(scope="module")
def tiny(make_tiny_model: Callable[..., Path]) -> Path:
    return make_tiny_model("llama", num_hidden_layers=1, intermediate_size=64)


def read_weights(weights: LogicalWeights) -> None:
    """Every tensor has the shape that the model says."""
    for name, shape in weights.spec.tensors().items():
        tensor = weights.tensor(name)
        values = tensor if isinstance(tensor, np.ndarray) else tensor.dequantize()
        assert values.shape == shape


def changed_folder(data: st.DataObject, folder: Path, sound: dict[str, bytes]) -> None:
    """One of the files is damaged; `sound` holds what all of them were."""
    for name, content in sound.items():
        (folder / name).write_bytes(content)
    name = data.draw(st.sampled_from(sorted(sound)))
    content = sound[name]
    if name.endswith(".safetensors"):
        content = changed_safetensors(data, content)
    elif data.draw(st.integers(0, 3)):
        content = json.dumps(changed_json(data, json.loads(content))).encode()
    else:
        content = changed_bytes(data, content, len(content))
    (folder / name).write_bytes(content)


def contents(folder: Path, *names: str) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in names}


@CASES
def test_a_hugging_face_folder(tiny: Path, tmp_path: Path, cases: int) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny, folder)
    sound = contents(folder, "config.json", "generation_config.json", "model.safetensors")
    whole = (folder / "model.safetensors").read_bytes()
    header = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])
    index = {"weight_map": {name: "model.safetensors" for name in header if name != "__metadata__"}}

    def read() -> None:
        source = open_source(folder)
        try:
            for name, shape in source.spec.tensors().items():
                assert source.tensor(name).shape == shape
        finally:
            source.close()

    def damaged(data: st.DataObject) -> Callable[[], object]:
        changed_folder(data, folder, sound)
        sharded = folder / "model.safetensors.index.json"
        sharded.unlink(missing_ok=True)
        (folder / "model-1.safetensors").unlink(missing_ok=True)
        if data.draw(st.integers(0, 3)) == 0:
            (folder / "model.safetensors").rename(folder / "model-1.safetensors")
            named = {"weight_map": dict.fromkeys(index["weight_map"], "model-1.safetensors")}
            sharded.write_text(json.dumps(changed_json(data, named)))
        return read

    check(cases, damaged)


@CASES
def test_a_gguf_file(tiny: Path, tmp_path: Path, cases: int) -> None:
    types = {"q_proj": "Q4_0", "k_proj": "Q4_1", "v_proj": "Q8_0", "embed": "Q8_0", "norm": "F32"}
    path = write_gguf(
        tiny, tmp_path / "m.gguf", lambda name: next((t for part, t in types.items() if part in name), "F16")
    )
    sound = path.read_bytes()
    header = sound.index(b"output_norm.weight") + 400

    def read() -> None:
        source = open_source(path)
        assert isinstance(source, GgufSource)
        try:
            read_weights(GgufWeights(source))
        finally:
            source.close()

    def damaged(data: st.DataObject) -> Callable[[], object]:
        # The vocabulary is most of the header; numbers and tensors come before and after it.
        part = data.draw(st.sampled_from([2000, header]))
        path.write_bytes(changed_bytes(data, sound, part))
        return read

    check(cases, damaged)


def write_foreign(kind: str, source: Path, out: Path) -> None:
    if kind == "gptq":
        write_checkpoint(source, out, GPTQ, lambda stem: Layer(symmetric=False, desc_act=True))
    elif kind == "awq":
        write_checkpoint(source, out, AWQ, lambda stem: Layer(symmetric=False))
    elif kind == "nf4":
        write_bnb_checkpoint(source, out, NF4_SETTINGS)
    elif kind == "nf4, double":
        write_bnb_checkpoint(source, out, NF4_SETTINGS, double=True)
    else:
        write_bnb_checkpoint(source, out, INT8_SETTINGS)


@CASES
@pytest.mark.parametrize("kind", ["gptq", "awq", *BNB])
def test_a_checkpoint_of_others(tiny: Path, tmp_path: Path, kind: str, cases: int) -> None:
    folder = tmp_path / "model"
    write_foreign(kind, tiny, folder)
    sound = contents(folder, "config.json", "model.safetensors")
    config = json.loads(sound["config.json"])

    def read() -> None:
        checkpoint = ForeignCheckpoint(folder)
        try:
            assert checkpoint.recipe is None or checkpoint.recipe.bits in (3, 4, 8)
            read_weights(checkpoint.weights)
        finally:
            checkpoint.close()

    def damaged(data: st.DataObject) -> Callable[[], object]:
        changed_folder(data, folder, sound)
        if data.draw(st.booleans()):
            settings = changed_json(data, config["quantization_config"])
            (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
        return read

    check(cases // 3 if kind in BNB else cases, damaged)


@pytest.fixture(scope="module")
def artifacts(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both halves of one quantized with zero points, and of one in NF4."""
    folder = tmp_path_factory.mktemp("artifacts")
    quantize(tiny, folder / "gptq", method="rtn", group_size=32, symmetric=False)
    quantize(tiny, folder / "bnb", method="nf4")
    return {name: folder / name for name in ("gptq", "bnb")}


@CASES
@pytest.mark.parametrize("kind", ["gptq", "bnb"])
def test_an_artifact(artifacts: dict[str, Path], tmp_path: Path, kind: str, cases: int) -> None:
    """Also where the manifest tells the size that a damaged file has."""
    folder = tmp_path / "artifact"
    shutil.copytree(artifacts[kind], folder)
    sound = contents(folder, "nybble.json", "config.json", "generation_config.json", "model.safetensors")
    manifest = json.loads(sound["nybble.json"])

    def read() -> None:
        artifact = open_artifact(folder, kind)
        assert artifact.generation_config is not None
        assert artifact.tokenizer_files
        read_weights(artifact.weights(kind))

    def damaged(data: st.DataObject) -> Callable[[], object]:
        changed_folder(data, folder, sound)
        if (folder / "nybble.json").read_bytes() == sound["nybble.json"] and data.draw(st.booleans()):
            told = json.loads(json.dumps(manifest))
            for name in sound:
                if name != "nybble.json":
                    told["files"][name]["size"] = (folder / name).stat().st_size
            (folder / "nybble.json").write_text(json.dumps(told))
        return read

    check(cases // 2, damaged)


@CASES
@pytest.mark.parametrize("kind", ["gptq", "bnb"])
def test_an_onnx_half(artifacts: dict[str, Path], tmp_path: Path, kind: str, cases: int) -> None:
    """The graph's bytes, or what it says of its tensors, operators and metadata."""
    onnx = pytest.importorskip("onnx")
    from nybble.export.onnx_reader import OnnxWeights

    folder = tmp_path / "onnx"
    shutil.copytree(artifacts[kind] / "onnx", folder)
    sound = (folder / "decoder.onnx").read_bytes()

    def changed_graph(data: st.DataObject) -> bytes:
        model = onnx.load_from_string(sound)
        for _ in range(data.draw(st.integers(1, 2))):
            part = data.draw(st.sampled_from(["metadata", "tensor", "attribute"]))
            if part == "metadata":
                entry = data.draw(st.sampled_from(list(model.metadata_props)))
                if entry.key in ("nybble.format", "nybble.contract"):
                    entry.value = str(data.draw(st.sampled_from(ODD_VALUES)))
                else:
                    entry.value = json.dumps(changed_json(data, json.loads(entry.value)))
            elif part == "tensor":
                change_tensor(data, data.draw(st.sampled_from(list(model.graph.initializer))))
            else:
                nodes = [n for n in model.graph.node if n.domain == "com.microsoft" and n.attribute]
                node = data.draw(st.sampled_from(nodes))
                attribute = data.draw(st.sampled_from(list(node.attribute)))
                if data.draw(st.booleans()):
                    attribute.i = data.draw(st.sampled_from([-1, 0, 1, 3, 16, 64, 1 << 31, 1 << 62]))
                else:
                    attribute.type = data.draw(st.sampled_from([1, 3, 7]))
                if data.draw(st.integers(0, 3)) == 0 and node.input:
                    node.input.pop()
        return bytes(model.SerializeToString())

    def change_tensor(data: st.DataObject, tensor: Any) -> None:
        kind = data.draw(st.sampled_from(["place", "shape", "type", "name"]))
        if kind == "place":
            entry = data.draw(st.sampled_from(list(tensor.external_data)))
            entry.value = str(data.draw(st.sampled_from(ODD_VALUES)))
        elif kind == "shape":
            sizes = data.draw(st.lists(st.sampled_from([-1, 0, 1, 64, 512, 1 << 31, 1 << 62]), max_size=3))
            del tensor.dims[:]
            tensor.dims.extend(sizes)
        elif kind == "type":
            tensor.data_type = data.draw(st.integers(0, 30))
        else:
            tensor.name = data.draw(st.sampled_from(["", "x", "model.embed_tokens.qweight"]))

    def read() -> None:
        read_weights(OnnxWeights(folder / "decoder.onnx"))

    def damaged(data: st.DataObject) -> Callable[[], object]:
        whole = data.draw(st.booleans())
        content = changed_bytes(data, sound, len(sound)) if whole else changed_graph(data)
        (folder / "decoder.onnx").write_bytes(content)
        return read

    check(cases // 2, damaged)


@CASES
def test_packed_weights(tiny: Path, tmp_path: Path, cases: int) -> None:
    """Bytes that are others, or a table that says something else and whose checksums fit: all are refused."""
    weights = quantized(load(tiny), 4, 32, False, True)
    path = tmp_path / "packed.bin"
    with open(path, "wb") as output:
        write_packed(output, FreshlyPacked(weights), DIGEST)
    sound = path.read_bytes()
    form = struct.Struct("=8sII32sQII")
    fields = form.unpack_from(sound)
    begin, size = fields[4:6]

    def read() -> None:
        try:
            found = open_packed(path, weights.spec, DIGEST)
        except (UnusableFile, OSError) as error:
            raise ModelFormatError(str(error)) from error
        for name, shape in weights.spec.tensors().items():
            if len(shape) == 2:
                assert found.linear(name).rows == shape[0]
            else:
                assert found.vector(name).shape == shape

    def damaged(data: st.DataObject) -> Callable[[], object]:
        if data.draw(st.booleans()):
            content = changed_bytes(data, sound, form.size + 4)
        else:
            table = json.dumps(changed_json(data, json.loads(sound[begin : begin + size]))).encode()
            head = form.pack(*fields[:4], begin, len(table), zlib.crc32(table))
            content = head + struct.pack("=I", zlib.crc32(head)) + sound[form.size + 4 : begin] + table
        path.write_bytes(content)
        return read

    check(cases, damaged)


@CASES
def test_a_saved_prefix(tiny: Path, tmp_path: Path, cases: int) -> None:
    """As packed weights, into a cache in which nothing stays then."""
    executor = CpuExecutor(quantized(load(tiny), 4, 32, True, False), threads=1)
    executor.allocate_kv(8, 16, "int8")
    path, key = tmp_path / "prefix", prefix_key(executor, DIGEST)
    pages = [np.random.default_rng(3).bytes(3 * size) for size in key.group_bytes]
    write_prefix(path, key, list(range(48)), [iter([part]) for part in pages])
    sound = path.read_bytes()
    form = struct.Struct("<8sIQII")
    magic, version, begin, size, _ = form.unpack_from(sound)

    def read() -> None:
        cache = KvCache(8, 16, (None,))
        try:
            load_prefix(path, DIGEST, executor, cache)
        finally:
            cache.check()

    def damaged(data: st.DataObject) -> Callable[[], object]:
        if data.draw(st.booleans()):
            content = changed_bytes(data, sound, form.size + 4)
        else:
            header = json.dumps(changed_json(data, json.loads(sound[begin : begin + size]))).encode()
            head = form.pack(magic, version, begin, len(header), zlib.crc32(header))
            content = head + struct.pack("<I", zlib.crc32(head)) + sound[form.size + 4 : begin] + header
        path.write_bytes(content)
        return read

    check(cases, damaged)
    executor.close()
