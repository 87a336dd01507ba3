"""`nybble quantize --method nf4` and `--method int8`: a checkpoint for bitsandbytes, and ONNX graphs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bnb_checkpoints import NF4
from safetensors.numpy import load_file

from nybble import LLM, SamplingParams, SettingError, quantize
from nybble.export import open_artifact
from nybble.models.open import open_source
from nybble.quant.packing import QuantizedTensor
from nybble.quant.packing_nf4 import Nf4Tensor
from nybble.verification import verify

IDS = list(range(3, 60))
SIZES = {"hidden_size": 128, "intermediate_size": 128}


@pytest.fixture(scope="module")
def artifacts(
    make_tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    folder, source = tmp_path_factory.mktemp("bnb"), make_tiny_model("qwen2", **SIZES)
    for method in ("nf4", "int8"):
        quantize(source, folder / method, method=method, threads=1)
    return {path.name: path for path in folder.iterdir()}


def test_nf4_tensors_are_as_bitsandbytes_has_them(
    artifacts: dict[str, Path], make_tiny_model: Callable[..., Path]
) -> None:
    """Unpacked byte by byte: the nearest entry of the code book, times the block's scale."""
    stored, source = (
        load_file(artifacts["nf4"] / "model.safetensors"),
        open_source(make_tiny_model("qwen2", **SIZES)),
    )
    for linear in source.spec.linears(1):
        name, weight = linear.name, source.tensor(linear.name)
        state = json.loads(stored[f"{name}.quant_state.bitsandbytes__nf4"].tobytes())
        assert state == {
            "quant_type": "nf4",
            "blocksize": 64,
            "dtype": "float16",
            "shape": list(weight.shape),
        }
        assert stored[name].shape == (weight.size // 2, 1)
        codes = [code for byte in stored[name][:, 0].tolist() for code in (byte >> 4, byte & 15)]
        scale = np.repeat(stored[f"{name}.absmax"], 64)
        meant = np.array(NF4)[codes] * scale
        nearest = np.abs(np.multiply.outer(scale, np.array(NF4)) - weight.reshape(-1, 1)).min(axis=1)
        assert np.allclose(np.abs(meant - weight.reshape(-1)), nearest, atol=1e-6)
    assert stored["model.norm.weight"].dtype == np.float16
    source.close()


def test_the_config_is_what_transformers_reads(artifacts: dict[str, Path]) -> None:
    transformers = pytest.importorskip("transformers")
    for method, bits in (("nf4", 4), ("int8", 8)):
        config = json.loads((artifacts[method] / "config.json").read_text())["quantization_config"]
        read = transformers.BitsAndBytesConfig.from_dict(config)
        assert read.quantization_method() == ("nf4" if bits == 4 else "llm_int8")
        assert read.load_in_4bit == (bits == 4)
        assert not (artifacts[method] / "quantize_config.json").exists()


@pytest.mark.parametrize(("method", "kind"), [("nf4", Nf4Tensor), ("int8", QuantizedTensor)])
def test_both_halves_hold_the_same(artifacts: dict[str, Path], method: str, kind: type) -> None:
    artifact = open_artifact(artifacts[method])
    assert artifact.formats == ("bnb", "onnx")
    assert artifact.manifest.recipe.method == method
    linears = [linear.name for layer in range(2) for linear in artifact.spec.linears(layer)]
    assert set(artifact.manifest.layer_errors) == set(linears)
    for half in ("bnb", "onnx"):
        weights = artifact.weights(half)
        assert all(isinstance(weights.tensor(name), kind) for name in linears)
    found = verify(artifacts[method], threads=1)
    assert found.tensors == len(artifact.spec.tensors())
    assert found.mean_kl is not None
    assert found.mean_kl < 1e-9


@pytest.mark.parametrize("method", ["nf4", "int8"])
def test_fused_layers_are_one_tensor(
    make_tiny_model: Callable[..., Path], tmp_path: Path, method: str
) -> None:
    quantize(make_tiny_model("phi3", intermediate_size=128), tmp_path / "q", method=method, threads=1)
    stored = load_file(tmp_path / "q" / "model.safetensors")
    assert "model.layers.0.self_attn.qkv_proj.weight" in stored
    assert verify(tmp_path / "q", threads=1).tensors


@pytest.mark.parametrize("method", ["nf4", "int8"])
def test_both_halves_run_on_both_executors(
    artifacts: dict[str, Path], method: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    scores: dict[tuple[str, str], Any] = {}
    for executor in ("cpu", "ort"):
        for half in ("bnb", "onnx"):
            with LLM(
                artifacts[method], executor=executor, format=half, threads=1, max_model_len=128, cache=False
            ) as llm:
                scores[executor, half] = np.array(llm.score(IDS).logprobs[1:], np.float64)
                assert llm.generate(IDS, SamplingParams(max_tokens=4, ignore_eos=True)).token_ids
    assert np.array_equal(scores["cpu", "bnb"], scores["cpu", "onnx"])
    assert np.allclose(scores["ort", "bnb"], scores["ort", "onnx"], atol=1e-5)
    assert np.abs(scores["cpu", "bnb"] - scores["ort", "bnb"]).mean() < 0.03


def test_what_does_not_go_together_is_refused(
    make_tiny_model: Callable[..., Path], tmp_path: Path, nybble: Callable[..., Any]
) -> None:
    source, out = make_tiny_model(), tmp_path / "out"
    for arguments, message in (
        (("--method", "nf4", "--formats", "gptq"), "is 'gptq'; expected bnb or onnx, or both with method"),
        (("--formats", "bnb"), "formats is 'bnb'; expected gptq or onnx, or both with method gptq"),
        (("--method", "nf4", "--group-size", "32"), "group_size is 32; expected 64 or 128 with method nf4"),
        (("--method", "nf4", "--calibration", "self"), "calibration is 'self', but method nf4 needs none"),
        (("--method", "int8", "--bits", "4"), "bits is 4; expected 8 with method int8"),
        (("--method", "nf4"), "down_proj.weight: has rows of 96; method nf4 has whole blocks of 64 in a row"),
    ):  # fmt: skip
        found = nybble("quantize", source, "-o", out, *arguments)
        assert message in found.error
        assert not out.exists()
    with pytest.raises(SettingError, match="clip_search is True; expected False with method nf4"):
        quantize(source, out, method="nf4", clip_search=True)
