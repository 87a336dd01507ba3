"""The commands, on a tiny model."""

import json
import shutil
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import nybble as package

Nybble = Callable[..., Any]


@pytest.mark.parametrize("command", ["quantize", "run", "chat", "bench", "info", "verify", "devices"])
def test_help_shows_an_example(nybble: Nybble, command: str) -> None:
    result = nybble(command, "--help")
    assert result.code == 0
    assert "Example" in result.out
    assert f"nybble {command}" in result.out


def test_version(nybble: Nybble) -> None:
    assert package.__version__ in nybble("--version").out


def test_wrong_usage_exits_with_2(nybble: Nybble) -> None:
    assert nybble("no-such-command").code == 2
    assert nybble("run").code == 2


def test_quantize_writes_both_halves(tiny_artifact: Path) -> None:
    for name in (
        "nybble.json",
        "model.safetensors",
        "onnx/decoder.onnx",
        "onnx/weights.bin",
        "tokenizer.json",
    ):
        assert (tiny_artifact / name).is_file()


def test_run_answers_from_both_halves_alike(nybble: Nybble, tiny_artifact: Path) -> None:
    answers = []
    for half in ("gptq", "onnx"):
        options = ("--max-tokens", "8", "--format", half, "--no-cache")
        result = nybble("run", tiny_artifact, "Say something.", *options)
        assert result.code == 0, result.err
        answers.append(result.out)
    assert answers[0].strip()
    assert answers[0] == answers[1]


def test_packed_weights_are_kept_unless_told_not_to(
    nybble: Nybble, tiny_artifact: Path, tmp_path: Path
) -> None:
    artifact = Path(shutil.copytree(tiny_artifact, tmp_path / "a", ignore=shutil.ignore_patterns("cache")))
    run = ("run", artifact, "Say something.", "--max-tokens", "8", "--executor", "cpu")
    answers = [nybble(*run, "--no-cache")]
    assert not (artifact / "cache").exists()
    answers.append(nybble(*run))
    assert (artifact / "cache/packed.bin").is_file()
    # Sizes stay, so that only who reads the weights can notice; a warm start does not, from either half.
    for name in ("model.safetensors", "onnx/weights.bin"):
        (artifact / name).write_bytes(bytes((artifact / name).stat().st_size))
    answers += [nybble(*run, "--format", half) for half in ("gptq", "onnx")]
    assert [answer.code for answer in answers] == [0, 0, 0, 0]
    assert len({answer.out for answer in answers}) == 1


def test_verify_passes_with_packed_weights_and_finds_those_of_another_model(
    nybble: Nybble, tiny_artifact: Path, tmp_path: Path
) -> None:
    artifact = Path(shutil.copytree(tiny_artifact, tmp_path / "a", ignore=shutil.ignore_patterns("cache")))
    assert nybble("run", artifact, "Say something.", "--max-tokens", "2", "--executor", "cpu").code == 0
    file = artifact / "cache/packed.bin"
    assert nybble("verify", artifact).code == 0
    content = bytearray(file.read_bytes())
    offset, size = struct.unpack_from("=QI", content, 48)
    table = json.loads(content[offset : offset + size])
    section = table["sections"][1]
    content[section["offset"]] ^= 1
    section["crc32"] = zlib.crc32(content[section["offset"] : section["offset"] + section["size"]])
    encoded = json.dumps(table, separators=(",", ":")).encode()
    head = content[:48] + struct.pack("=QII", offset, len(encoded), zlib.crc32(encoded))
    start = head + struct.pack("=I", zlib.crc32(head))
    file.write_bytes(start + content[len(start) : offset] + encoded)
    result = nybble("verify", artifact)
    assert result.code == 1
    assert "packed.bin: model.layers.0" in result.error


def test_run_shows_statistics(nybble: Nybble, tiny_artifact: Path) -> None:
    result = nybble("run", tiny_artifact, "Once", "--raw", "--max-tokens", "4", "--ignore-eos", "--stats")
    assert "4 answer tokens" in result.err
    assert "ended by length" in result.err


def test_a_seed_repeats_a_sampled_answer(nybble: Nybble, tiny_artifact: Path) -> None:
    arguments = ("run", tiny_artifact, "Once", "--temperature", "1", "--max-tokens", "12", "--seed")
    first, again, other = (nybble(*arguments, seed).out for seed in ("1", "1", "2"))
    assert first == again != other


def test_info_names_spec_recipe_and_errors(nybble: Nybble, tiny_artifact: Path) -> None:
    data = json.loads(nybble("info", tiny_artifact, "--json").out)
    assert data["spec"]["model_type"] == "llama"
    assert data["recipe"]["bits"] == 4
    assert len(data["layer_errors"]) == 14
    assert all(0 < error < 1 for error in data["layer_errors"].values())
    text = nybble("info", tiny_artifact, "--layers").out
    assert "model.layers.1.mlp.down_proj.weight" in text
    assert "gptq, " not in text
    assert "4, group size 64, symmetric" in text


def test_verify_finds_the_halves_equal(nybble: Nybble, tiny_artifact: Path) -> None:
    result = nybble("verify", tiny_artifact)
    assert result.code == 0, result.err
    assert "tensors equal in both halves" in result.out
    assert "same top token 100.0%" in result.out


def test_devices_shows_this_machine(nybble: Nybble) -> None:
    data = json.loads(nybble("devices", "--json").out)
    assert data["machine"]["usable_cores"] >= 1
    assert "raspberry-pi-5" in data["profiles"]
    assert "raspberry-pi-5" in nybble("devices").out


def test_devices_measures_the_disk_under_an_artifact(nybble: Nybble, tiny_artifact: Path) -> None:
    data = json.loads(nybble("devices", "--artifact", tiny_artifact, "--json").out)
    assert data["disk"]["path"] == str(tiny_artifact)
    assert data["disk"]["bytes_per_second"] > 0
    refused = nybble("devices", "--artifact", tiny_artifact / "absent")
    assert refused.code == 1
    assert "absent" in refused.error


def test_plain_progress_when_the_output_is_no_terminal(
    nybble: Nybble, make_tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    result = nybble("quantize", make_tiny_model(), "-o", tmp_path / "out", "--method", "rtn")
    assert result.code == 0, result.err
    assert "quantize: 2/2" in result.err
    assert "\x1b" not in result.err


def test_a_closed_pipe_ends_quietly(tiny_artifact: Path) -> None:
    command = [sys.executable, "-m", "nybble", "info", str(tiny_artifact), "--json"]
    ran = subprocess.run(
        f"{' '.join(command)} | head -c 1 >/dev/null", shell=True, capture_output=True, text=True, check=False
    )
    assert ran.stderr == ""


def test_chat_keeps_the_conversation(
    nybble: Nybble, tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(["Hello", "/system Be brief.", "/system", "Again", "/reset", "/nonsense", "/exit", "unread"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    result = nybble("chat", tiny_artifact, "--max-tokens", "4", "--stats")
    assert result.code == 0, result.err
    assert "Be brief." in result.out
    assert "no such command" in result.out
    assert result.err.count("answer tokens") == 2
    assert next(lines) == "unread"
