"""Bad input: one clear line that names what is wrong, a non-zero exit, and nothing left behind."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

Nybble = Callable[..., Any]
SMALL = ("--samples", "4", "--seq-len", "64")


@pytest.fixture
def model(make_tiny_model: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of a tiny model, to be damaged."""
    return Path(shutil.copytree(make_tiny_model(), tmp_path / "model"))


@pytest.fixture
def refused(nybble: Nybble, tmp_path: Path) -> Callable[..., str]:
    """`refused(source, *options) -> str`: the line that quantizing ends with; nothing is written."""

    def run(source: Path, *options: str | Path) -> str:
        before = sorted(tmp_path.iterdir())
        result = nybble("quantize", source, "-o", tmp_path / "out", *SMALL, *options)
        assert result.code == 1
        assert sorted(tmp_path.iterdir()) == before
        return result.error

    return run


def edit_config(model: Path, **changes: object) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensor(model: Path, name: str, change: Callable[[np.ndarray], np.ndarray | None]) -> None:
    path = model / "model.safetensors"
    tensors = load_file(path)
    changed = change(tensors.pop(name))
    if changed is not None:
        tensors[name] = changed
    save_file(tensors, path)


def test_no_such_path(refused: Callable[..., str], tmp_path: Path) -> None:
    assert str(tmp_path / "absent") in refused(tmp_path / "absent")


def test_no_config(refused: Callable[..., str], model: Path) -> None:
    (model / "config.json").unlink()
    assert "config.json" in refused(model)


def test_unknown_model_type(refused: Callable[..., str], model: Path) -> None:
    edit_config(model, model_type="frobnicator")
    error = refused(model)
    assert "frobnicator" in error
    assert "llama" in error


@pytest.mark.parametrize("keep", [4, 8, 100])
def test_truncated_safetensors(refused: Callable[..., str], model: Path, keep: int) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert "model.safetensors" in refused(model)


def test_oversized_safetensors_header(refused: Callable[..., str], model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 62) + path.read_bytes()[8:])
    assert "model.safetensors" in refused(model)


def test_overlapping_safetensors(refused: Callable[..., str], model: Path) -> None:
    path = model / "model.safetensors"
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    names = [n for n in header if n.endswith("norm.weight")]
    header[names[1]]["data_offsets"] = header[names[0]]["data_offsets"]
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])
    assert "model.safetensors" in refused(model)


def test_missing_tensor(refused: Callable[..., str], model: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    edit_tensor(model, name, lambda tensor: None)
    assert name in refused(model)


def test_tensor_of_the_wrong_shape(refused: Callable[..., str], model: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    edit_tensor(model, name, lambda tensor: tensor[:-1])
    error = refused(model)
    assert name in error
    assert "32" in error
    assert "31" in error


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_tensor_that_is_not_finite(refused: Callable[..., str], model: Path, value: float) -> None:
    name = "model.layers.1.self_attn.o_proj.weight"

    def spoil(tensor: np.ndarray) -> np.ndarray:
        tensor = tensor.copy()
        tensor[3, 5] = value
        return tensor

    edit_tensor(model, name, spoil)
    assert name in refused(model)


def test_truncated_gguf(refused: Callable[..., str], smollm2_gguf: Path, tmp_path: Path) -> None:
    part = tmp_path / "part.gguf"
    with smollm2_gguf.open("rb") as file:
        part.write_bytes(file.read(1 << 20))
    assert "part.gguf" in refused(part)


def test_gguf_with_a_wrong_magic(refused: Callable[..., str], smollm2_gguf: Path, tmp_path: Path) -> None:
    part = tmp_path / "part.gguf"
    with smollm2_gguf.open("rb") as file:
        part.write_bytes(b"GGML" + file.read(1 << 20)[4:])
    assert "part.gguf" in refused(part)


@pytest.mark.parametrize("place", [8, 16])  # the counts of tensors and of metadata
def test_gguf_whose_count_overflows(
    refused: Callable[..., str], smollm2_gguf: Path, tmp_path: Path, place: int
) -> None:
    part = tmp_path / "part.gguf"
    with smollm2_gguf.open("rb") as file:
        data = bytearray(file.read(1 << 20))
    data[place : place + 8] = struct.pack("<Q", (1 << 64) - 1)
    part.write_bytes(data)
    assert "part.gguf" in refused(part)


def test_calibration_too_short(refused: Callable[..., str], model: Path, tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("Too short.")
    error = refused(model, "--calibration", text)
    assert "short.txt" in error
    assert "256" in error


def test_calibration_not_utf8(refused: Callable[..., str], model: Path, tmp_path: Path) -> None:
    text = tmp_path / "latin.txt"
    text.write_bytes("naïve ".encode("latin-1") * 1000)
    assert "latin.txt" in refused(model, "--calibration", text)


def test_output_exists(nybble: Nybble, model: Path, tiny_artifact: Path) -> None:
    manifest = (tiny_artifact / "nybble.json").read_bytes()
    result = nybble("quantize", model, "-o", tiny_artifact, *SMALL)
    assert result.code == 1
    assert "--overwrite" in result.error or "overwrite" in result.error
    assert (tiny_artifact / "nybble.json").read_bytes() == manifest


def test_overwrite_never_replaces_a_folder_that_is_no_artifact(
    nybble: Nybble, model: Path, tmp_path: Path
) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    result = nybble("quantize", model, "-o", precious, "--overwrite", *SMALL)
    assert result.code == 1
    assert "precious" in result.error
    assert (precious / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("options", [("--bits", "few"), ("--group-size", "17"), ("--damp", "many")])
def test_wrong_options(nybble: Nybble, model: Path, tmp_path: Path, options: tuple[str, str]) -> None:
    result = nybble("quantize", model, "-o", tmp_path / "out", *options)
    assert result.code == 2
    assert options[1] in result.err


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--bits", "12"), "bits is 12; expected 3, 4 or 8, or a budget above 3 and up to 9"),
        (("--bits", "2.5"), "bits is 2.5; expected 3, 4 or 8, or a budget"),
        (("--bits", "nan"), "bits is nan; expected 3, 4 or 8, or a budget"),
        (("--bits", "4.5", "--recipe", "fast"), "bits is 4.5; expected 3, 4 or 8 with method rtn"),
        (("--bits", "8", "--method", "nf4"), "bits is 8; expected 4 with method nf4"),
        (("--bits", "12", "--method", "int8"), "bits is 12; expected 8 with method int8"),
        (("--bits", "3.01"), "bits are a budget, 3.01; expected at least 3.267"),
        (("--bits", "4.8", "--group-size", "128"), "group_size is 128; expected none with a budget of bits"),
        (("--recipe", "quick"), "recipe 'quick' is unknown"),
        (("--correction", "2"), "correction is 2.0"),
        (("--recipe", "best", "--method", "rtn"), "tune_epochs is 1; expected 0 for method rtn"),
        (("--seed", "-1"), "seed is -1"),
    ],
)
def test_settings_that_cannot_be(
    refused: Callable[..., str], model: Path, options: tuple[str, ...], expected: str
) -> None:
    assert expected in refused(model, *options)


@pytest.mark.parametrize("option", ["--samples", "--seq-len", "--threads"])
def test_options_out_of_range(refused: Callable[..., str], model: Path, option: str) -> None:
    error = refused(model, option, "0")
    assert option.removeprefix("--").replace("-", "_") in error


def test_prompt_longer_than_the_context(nybble: Nybble, tiny_artifact: Path) -> None:
    result = nybble("run", tiny_artifact, "word " * 600, "--raw")
    assert result.code == 1
    assert "512" in result.error


@pytest.mark.parametrize("options", [(), ("--raw",)])
def test_empty_prompt(nybble: Nybble, tiny_artifact: Path, options: tuple[str, ...]) -> None:
    result = nybble("run", tiny_artifact, "", *options)
    assert result.code == 1
    assert "empty" in result.error


def test_a_changed_byte_is_found_and_named(nybble: Nybble, tiny_artifact: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny_artifact, tmp_path / "copy"))
    weights = copy / "onnx" / "weights.bin"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    result = nybble("verify", copy)
    assert result.code == 1
    assert "weights.bin" in result.error


@pytest.mark.parametrize("command", ["run", "info", "verify", "chat"])
def test_what_is_no_artifact(nybble: Nybble, tmp_path: Path, command: str) -> None:
    prompt = ["Hello"] if command == "run" else []
    for path in (tmp_path, tmp_path / "absent"):
        result = nybble(command, path, *prompt)
        assert result.code == 1
        assert str(path) in result.error
