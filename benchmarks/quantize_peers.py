"""What others make of the same weights, in the form that `quantize_quality.compare` takes: GPTQModel and
llama.cpp, each in an environment of its own."""

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from quantize_quality import compare, encoder, windows_of

from nybble.models import ModelSource, open_source
from nybble.models.gguf_families import FAMILIES
from nybble.models.gguf_source import GgufSource, gguf_name
from nybble.quant.packing import QuantizedTensor, from_gptq, quantize_head
from nybble.quant.recipe import Recipe

# Where others' environments start scripts from: no file there has a package's name, as `kernels.py` here has.
PEERS = Path(__file__).parent / "peers"
LLAMACPP_KINDS = ("Q4_0", "Q4_K_M")


class ChildError(Exception):
    """A process that failed, and the end of what it said."""


class GptqFolder:
    """A GPTQ checkpoint in one safetensors file, with the 8-bit embedding and head that ours has."""

    def __init__(self, folder: Path, source: ModelSource, recipe: Recipe) -> None:
        from safetensors import safe_open

        self.spec, self._source, self._recipe = source.spec, source, recipe
        self._format = json.loads((folder / "quantize_config.json").read_text())["checkpoint_format"]
        self._file = safe_open(next(iter(folder.glob("*.safetensors"))), "np")
        self._names = set(self._file.keys())

    def tensor(self, name: str) -> QuantizedTensor | NDArray[np.float32]:
        if name in (self.spec.embedding_name, self.spec.head_name):
            return quantize_head(self._source.tensor(name))
        stem = name.removesuffix(".weight")
        if f"{stem}.qweight" not in self._names:
            return self._source.tensor(name)
        parts = {
            part: self._file.get_tensor(f"{stem}.{part}") for part in ("qweight", "qzeros", "scales", "g_idx")
        }
        bits, group_size = self._recipe.bits, self._recipe.group_size
        return from_gptq(**parts, bits=bits, group_size=group_size, checkpoint_format=self._format, name=name)


def write_for_peer(source: ModelSource, recipe: Recipe, folder: Path) -> None:
    """The model as a float32 Hugging Face folder, and the calibration windows beside it."""
    from safetensors.numpy import save_file

    from nybble.quant.calibration import load_calibration

    config = {**source.config, "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    for name, content in source.tokenizer_files.items():
        (folder / name).write_bytes(content)
    tensors = {name: source.tensor(name) for name in source.spec.tensors()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    calibration = load_calibration(None, encode=encoder(source), recipe=recipe)
    np.save(folder / "calibration.npy", calibration.token_ids)


def measure_gptqmodel(source: ModelSource, threads: int, python: str, reference: Path) -> dict[str, Any]:
    """GPTQModel with 4 bits, symmetric, group 64, on our calibration windows."""
    import torch

    recipe = Recipe()
    with tempfile.TemporaryDirectory() as name:
        original, output = Path(name) / "model", Path(name) / "quantized"
        original.mkdir()
        write_for_peer(source, recipe, original)
        settings = {
            "bits": recipe.bits,
            "group_size": recipe.group_size,
            "sym": recipe.symmetric,
            "desc_act": recipe.desc_act,
        }
        command = [
            os.path.abspath(python),
            str(PEERS / "gptqmodel_quantize.py"),
            str(original),
            str(output),
            json.dumps(settings),
        ]
        figures = json.loads(run(command, threads, name).splitlines()[-1])
        peer = GptqFolder(output, source, recipe)
        ends = torch.load(reference, weights_only=False)
        return figures | {
            "bits_per_weight": recipe.bits + 16 / recipe.group_size,
            "texts": compare(peer, windows_of(source), ends),
        }


def write_gguf(source: ModelSource, original: Path, output: Path) -> None:
    """A source of family llama as a GGUF file in float16, with the metadata of another file of its model."""
    from gguf import GGUFReader, GGUFValueType, GGUFWriter

    spec, family = source.spec, FAMILIES["llama"]
    reader, writer = GGUFReader(original), GGUFWriter(output, "llama")
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], inner)
    writer.add_file_type(1)  # float16
    heads = {"q_proj": spec.num_heads, "k_proj": spec.num_kv_heads}
    for name, shape in spec.tensors().items():
        weight = source.tensor(name)
        for part, count in heads.items():
            if f".self_attn.{part}." in name:  # rows of a head are in rotated pairs there
                weight = weight.reshape(count, 2, -1, shape[-1]).swapaxes(1, 2).reshape(shape)
        stored = np.ascontiguousarray(weight, np.float32 if len(shape) == 1 else np.float16)
        writer.add_tensor(gguf_name(name, family.layer_names), stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def measure_llamacpp(
    source: ModelSource, original: Path, threads: int, python: str, reference: Path, kind: str
) -> dict[str, Any]:
    """llama.cpp quantizes the source, and its file's weights are compared as ours are, in float32: embedding
    and head are what that file has."""
    import torch

    with tempfile.TemporaryDirectory() as name:
        half, output = Path(name) / "half.gguf", Path(name) / "quantized.gguf"
        write_gguf(source, original, half)
        script = str(PEERS / "llama_cpp_quantize.py")
        command = [os.path.abspath(python), script, str(half), str(output), kind, str(threads)]
        figures = json.loads(run(command, threads, name).splitlines()[-1])
        with open_source(output) as peer:
            assert isinstance(peer, GgufSource)
            ends = torch.load(reference, weights_only=False)
            return figures | {
                "bits_per_weight": gguf_bits(peer),
                "texts": compare(peer, windows_of(source), ends),
            }


def gguf_bits(source: GgufSource) -> float:
    """Bits per weight of the linear layers."""
    linears = [x for layer in range(source.spec.num_layers) for x in source.spec.linears(layer)]
    used = sum(source.rows(x.name, 0, x.out_features).nbytes for x in linears)
    return 8 * used / sum(x.out_features * x.in_features for x in linears)


def run(command: list[str], threads: int, folder: str | None = None) -> str:
    """A child's standard output; its standard error is shown only where it fails. In `folder` it may leave
    files, as GPTQModel does its logs."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    environment["GPTQMODEL_CPU_WORKERS"] = str(max(2, threads))  # with fewer it does not start
    child = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, cwd=folder)
    if child.returncode:
        raise ChildError(f"{' '.join(command[:3])} ... failed:\n{child.stderr[-4000:]}")
    return child.stdout
