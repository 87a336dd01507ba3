"""The artifact folder: written, opened, damaged, halved, verified."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nybble.errors import ModelFormatError, OutputError, SettingError
from nybble.export import artifact_bytes, open_artifact, verify_files, verify_integers, write_artifact
from nybble.quant.model import QuantizedModel
from nybble.quant.packing import QuantizedTensor
from nybble.quant.recipe import LinearFormat

Make = Callable[..., QuantizedModel]


@pytest.fixture(scope="module")
def whole(rtn_model: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact with both halves; tests copy it before they change it."""
    out = tmp_path_factory.mktemp("artifact") / "tiny"
    write_artifact(rtn_model(), out, quality={"perplexity": 16.25})
    return out


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "tiny"))


def test_the_manifest_lists_every_file_with_its_size_and_digest(whole: Path) -> None:
    files = json.loads((whole / "nybble.json").read_text(encoding="utf-8"))["files"]
    on_disk = {p.relative_to(whole).as_posix(): p for p in whole.rglob("*") if p.is_file()}
    assert files.keys() == on_disk.keys() - {"nybble.json"}
    for name, entry in files.items():
        content = on_disk[name].read_bytes()
        assert entry["size"] == len(content)
        assert entry["sha256"] == hashlib.sha256(content).hexdigest()
    halves = {name: entry["half"] for name, entry in files.items()}
    assert halves["model.safetensors"] == halves["quantize_config.json"] == "gptq"
    assert halves["onnx/decoder.onnx"] == halves["onnx/weights.bin"] == "onnx"
    assert halves["config.json"] is halves["tokenizer.json"] is None


def test_an_opened_artifact_tells_what_was_written(whole: Path, rtn_model: Make) -> None:
    model, artifact = rtn_model(), open_artifact(whole)
    assert artifact.spec == model.spec
    assert artifact.formats == ("gptq", "onnx")
    assert artifact.digest == hashlib.sha256((whole / "nybble.json").read_bytes()).hexdigest()
    assert artifact.generation_config == model.generation_config
    assert artifact.tokenizer_files == model.tokenizer_files
    assert artifact.onnx_path == whole / "onnx" / "decoder.onnx"
    manifest = artifact.manifest
    assert manifest.recipe == model.recipe
    assert (manifest.source_origin, manifest.source_digest) == (model.origin, model.source_digest)
    assert manifest.layer_errors == model.layer_errors
    assert manifest.calibration_digest == model.calibration_digest
    assert manifest.quality == {"perplexity": 16.25}
    assert manifest.created_with["nybble"]
    assert artifact.config["torch_dtype"] == "float16"
    assert verify_files(whole) == []


def test_the_same_model_gives_the_same_bytes(rtn_model: Make, whole: Path, tmp_path: Path) -> None:
    write_artifact(rtn_model(), tmp_path / "again", quality={"perplexity": 16.25})
    for path in whole.rglob("*"):
        if path.is_file():
            other = tmp_path / "again" / path.relative_to(whole)
            assert path.read_bytes() == other.read_bytes(), path.name


@pytest.mark.parametrize("recipe", [{}, {"symmetric": False}, {"bits": 8, "group_size": -1}, {"bits": 3},
                                    {"group_size": 64, "act_order": "dynamic"}], ids=str)  # fmt: skip
@pytest.mark.parametrize("family", ["llama", "qwen2", "olmo2", "gemma2", "phi3"])
def test_both_halves_hold_the_same_numbers(
    rtn_model: Make, tmp_path: Path, recipe: dict, family: str
) -> None:
    model = rtn_model(family, **recipe)
    write_artifact(model, tmp_path / "out")
    assert verify_integers(tmp_path / "out") == len(model.spec.tensors())
    weights = open_artifact(tmp_path / "out").weights("onnx")
    for name, expected in model.tensors.items():
        if isinstance(expected, QuantizedTensor):
            np.testing.assert_array_equal(weights.tensor(name).dequantize(), expected.dequantize())


@pytest.mark.parametrize(
    ("family", "parts", "stored"),
    [
        ("llama", ["self_attn.v_proj"], "self_attn.v_proj"),
        ("phi3", ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], "self_attn.qkv_proj"),
    ],
)
def test_a_layers_own_format_is_written_under_the_checkpoints_name(
    rtn_model: Make, tmp_path: Path, family: str, parts: list[str], stored: str
) -> None:
    names = [f"model.layers.1.{part}.weight" for part in parts]
    eight = LinearFormat(8, 64, True)
    model = rtn_model(family, layer_formats=tuple((name, eight) for name in names))
    write_artifact(model, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "quantize_config.json").read_text())
    pattern = "+:^" + f"model.layers.1.{stored}$".replace(".", "\\.")
    assert config["dynamic"] == {pattern: {"bits": 8, "group_size": 64}}
    assert verify_integers(tmp_path / "out") == len(model.spec.tensors())
    weights = open_artifact(tmp_path / "out").weights("gptq")
    for name in names:
        found, expected = weights.tensor(name), model.tensors[name]
        assert isinstance(expected, QuantizedTensor)
        assert (found.bits, found.group_size) == (8, 64)
        np.testing.assert_array_equal(found.dequantize(), expected.dequantize())


def test_integers_that_differ_are_found_and_named(rtn_model: Make, tmp_path: Path) -> None:
    model = rtn_model()
    name = "model.layers.1.self_attn.o_proj.weight"
    tensor = model.tensors[name]
    for field in ("packed", "scales"):
        changed = getattr(tensor, field).copy()
        changed.reshape(-1).view(np.uint8)[5] ^= 1
        other = replace(model, tensors={**model.tensors, name: replace(tensor, **{field: changed})})
        write_artifact(model, tmp_path / "out", overwrite=True)
        write_artifact(other, tmp_path / "other", overwrite=True)
        shutil.copytree(tmp_path / "other" / "onnx", tmp_path / "out" / "onnx", dirs_exist_ok=True)
        with pytest.raises(ModelFormatError, match=r"layers\.1\.self_attn\.o_proj\.weight differs"):
            verify_integers(tmp_path / "out")


def test_a_changed_byte_is_found_in_every_file(copy: Path) -> None:
    names = [p.relative_to(copy).as_posix() for p in copy.rglob("*") if p.is_file()]
    names.remove("nybble.json")
    for name in names:
        path = copy / name
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        (problem,) = verify_files(copy)
        assert str(path) in problem
        assert "SHA-256" in problem
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    assert verify_files(copy) == []


def test_truncated_missing_and_added_files_are_found(copy: Path) -> None:
    weights = copy / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1)
    (copy / "tokenizer.json").unlink()
    (copy / "onnx" / "notes.txt").write_text("mine")
    problems = verify_files(copy)
    assert [p.split(": ")[0] for p in problems] == [
        str(weights), str(copy / "tokenizer.json"), str(copy / "onnx" / "notes.txt")
    ]  # fmt: skip
    with pytest.raises(ModelFormatError, match=r"tokenizer\.json: is missing"):
        open_artifact(copy)
    with pytest.raises(ModelFormatError, match=r"tokenizer\.json: is missing"):
        open_artifact(copy, "onnx")


def test_what_executors_keep_in_the_folder_cache_is_no_part_of_it(rtn_model: Make, copy: Path) -> None:
    (copy / "cache").mkdir()
    (copy / "cache/packed.bin").write_bytes(b"weights")
    assert verify_files(copy) == []
    (copy / "cached").write_bytes(b"")
    assert [str(copy / "cached")] == [line.split(":")[0] for line in verify_files(copy)]
    write_artifact(rtn_model(), copy, overwrite=True)
    assert not (copy / "cache").exists()


def test_opening_one_half_does_not_look_at_the_other(copy: Path) -> None:
    weights = copy / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1)
    assert open_artifact(copy, "onnx").weights("onnx").spec
    for format in ("gptq", "auto"):
        with pytest.raises(ModelFormatError, match=r"model\.safetensors: has \d+ bytes"):
            open_artifact(copy, format)


def test_a_half_may_be_deleted(copy: Path) -> None:
    shutil.rmtree(copy / "onnx")
    artifact = open_artifact(copy)
    assert artifact.formats == ("gptq",)
    assert artifact.chosen("auto", preferred="onnx") == "gptq"
    assert isinstance(artifact.weights().tensor("model.layers.0.mlp.up_proj.weight"), QuantizedTensor)
    assert verify_files(copy) == []
    with pytest.raises(ModelFormatError, match="no onnx half"):
        open_artifact(copy, "onnx")
    with pytest.raises(ModelFormatError, match="no onnx half"):
        verify_integers(copy)
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelFormatError, match="neither half"):
        open_artifact(copy)
    assert any("neither half" in p for p in verify_files(copy))


@pytest.mark.parametrize("gone", [["model.safetensors"], ["model.safetensors", "quantize_config.json"]])
def test_the_gptq_half_may_be_deleted_with_or_without_its_settings(copy: Path, gone: list[str]) -> None:
    for name in gone:
        (copy / name).unlink()
    artifact = open_artifact(copy)
    assert artifact.formats == ("onnx",)
    assert isinstance(artifact.weights().tensor("model.layers.0.mlp.up_proj.weight"), QuantizedTensor)
    assert verify_files(copy) == []


def test_one_shard_missing_is_damage_not_a_deleted_half(rtn_model: Make, tmp_path: Path) -> None:
    write_artifact(rtn_model(), tmp_path / "out", formats=["gptq"], shard_limit=60_000)
    shard = sorted((tmp_path / "out").glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelFormatError, match=shard.name):
        open_artifact(tmp_path / "out")
    assert any(shard.name in p for p in verify_files(tmp_path / "out"))


def test_one_format_writes_one_half(rtn_model: Make, tmp_path: Path) -> None:
    write_artifact(rtn_model(), tmp_path / "gptq", formats=["gptq"])
    write_artifact(rtn_model(), tmp_path / "onnx", formats=["onnx"])
    assert not (tmp_path / "gptq" / "onnx").exists()
    assert list((tmp_path / "onnx").glob("*.safetensors")) == []
    config = json.loads((tmp_path / "onnx" / "config.json").read_text(encoding="utf-8"))
    assert "quantization_config" not in config  # a loader would look for weights that are not there
    assert open_artifact(tmp_path / "onnx").formats == ("onnx",)
    for formats in ([], ["gguf"]):
        with pytest.raises(SettingError, match="formats"):
            write_artifact(rtn_model(), tmp_path / "none", formats=formats)


def test_what_is_no_artifact_is_refused_with_advice(tmp_path: Path, make_tiny_model: Callable) -> None:
    for missing in (tmp_path / "missing", "nul\0nul", "x" * 5000, ""):
        with pytest.raises(ModelFormatError, match=r"no such folder|not an artifact"):
            open_artifact(missing)
    with pytest.raises(ModelFormatError, match="nybble quantize"):
        open_artifact(make_tiny_model())
    (tmp_path / "file").write_text("x")
    with pytest.raises(ModelFormatError, match="is a file"):
        open_artifact(tmp_path / "file")
    with pytest.raises(ModelFormatError, match="not an artifact"):
        verify_files(tmp_path)


def test_a_newer_artifact_is_refused(copy: Path) -> None:
    path = copy / "nybble.json"
    path.write_text(path.read_text().replace('"format_version": 1', '"format_version": 2'))
    for read in (open_artifact, verify_files):
        with pytest.raises(ModelFormatError, match="upgrade nybble"):
            read(copy)


@pytest.mark.parametrize("opener", [open_artifact, verify_files])
def test_opening_puts_back_what_a_dead_process_had_moved_aside(copy: Path, opener: Callable) -> None:
    link = copy.parent / "link"
    link.symlink_to(copy)
    for path in (copy, link):
        copy.rename(copy.with_name(".tiny.nybble-old-1-0"))
        opener(path)
        assert (copy / "nybble.json").is_file()


def test_an_existing_output_is_replaced_only_when_asked(rtn_model: Make, copy: Path) -> None:
    before = (copy / "nybble.json").read_bytes()
    with pytest.raises(OutputError, match="--overwrite"):
        write_artifact(rtn_model(bits=8), copy)
    assert (copy / "nybble.json").read_bytes() == before
    write_artifact(rtn_model(bits=8), copy, overwrite=True, formats=["gptq"])
    assert open_artifact(copy).manifest.recipe.bits == 8
    assert verify_files(copy) == []
    assert [p.name for p in copy.parent.iterdir()] == [copy.name]


def test_group_sizes_that_loaders_refuse_are_warned_about_and_listed(
    rtn_model: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = write_artifact(rtn_model(group_size=64), tmp_path / "short", formats=["gptq"])
    assert set(manifest.refused_by) == {"vLLM", "SGLang"}
    assert "64 does not divide an input size of 96" in caplog.text
    caplog.clear()
    manifest = write_artifact(rtn_model(group_size=32), tmp_path / "even", formats=["gptq"])
    assert manifest.refused_by == {}
    assert caplog.text == ""


def test_zero_points_are_written_in_the_format_that_loaders_take(rtn_model: Make, tmp_path: Path) -> None:
    def checkpoint_format(out: str) -> str:
        config = json.loads((tmp_path / out / "quantize_config.json").read_text(encoding="utf-8"))
        return str(config["checkpoint_format"])

    write_artifact(rtn_model(symmetric=True), tmp_path / "sym", formats=["gptq"])
    write_artifact(rtn_model(symmetric=False), tmp_path / "asym", formats=["gptq"])
    assert checkpoint_format("sym") == "gptq"
    assert checkpoint_format("asym") == "gptq_v2"
    manifest = write_artifact(
        rtn_model(symmetric=False), tmp_path / "v1", formats=["gptq"], checkpoint_format="gptq"
    )
    assert checkpoint_format("v1") == "gptq"
    assert "GPTQModel" in manifest.refused_by
    with pytest.raises(SettingError, match="checkpoint_format"):
        write_artifact(rtn_model(), tmp_path / "x", checkpoint_format="marlin")


def test_no_absolute_path_travels_with_the_artifact(rtn_model: Make, tmp_path: Path) -> None:
    model = rtn_model()
    config = {**model.config, "_name_or_path": "/home/someone/models/llama"}
    write_artifact(replace(model, config=config), tmp_path / "out")
    for path in (tmp_path / "out").rglob("*"):
        assert path.is_dir() or b"/home/someone" not in path.read_bytes()
        assert path.is_dir() or str(tmp_path).encode() not in path.read_bytes()


def test_a_tokenizer_file_cannot_leave_the_folder(rtn_model: Make, tmp_path: Path) -> None:
    for name in ("../evil", "/tmp/evil", "nybble.json"):
        model = replace(rtn_model(), tokenizer_files={name: b"x"})
        with pytest.raises(OutputError, match="not a name"):
            write_artifact(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_progress_counts_to_the_end_of_each_stage(rtn_model: Make, tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    write_artifact(rtn_model(), tmp_path / "out", progress=lambda *call: calls.append(call))
    last = {stage: (done, total) for stage, done, total in calls}
    assert set(last) == {"gptq", "onnx", "checksums"}
    assert all(done == total for done, total in last.values())


@pytest.mark.parametrize("formats", [["gptq"], ["onnx"], ["gptq", "onnx"]])
def test_a_disk_that_is_too_small_is_refused_beforehand_or_on_the_way(
    rtn_model: Make, small_disk: Path, formats: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = rtn_model()
    with pytest.raises(OutputError, match=r"the disk is full: \d+\.\d MB are needed"):
        write_artifact(model, small_disk / "out", formats=formats)
    # As if another program had filled it since then.
    monkeypatch.setattr("nybble.export.artifact_writer.check_space", lambda out, needed: None)
    fill = small_disk / "fill"
    fill.write_bytes(bytes(900_000))
    with pytest.raises(OutputError, match="the disk is full; nothing was left") as error:
        write_artifact(model, small_disk / "out", formats=formats)
    assert "\n" not in str(error.value)
    assert list(small_disk.iterdir()) == [fill]


@pytest.mark.parametrize("recipe", [{}, {"bits": 8, "symmetric": False}, {"group_size": -1}], ids=str)
def test_sizes_are_known_beforehand(rtn_model: Make, tmp_path: Path, recipe: dict) -> None:
    model = rtn_model("qwen2", {"vocab_size": 2000, "hidden_size": 256, "num_hidden_layers": 1}, **recipe)
    manifest = write_artifact(model, tmp_path / "out")
    predicted = artifact_bytes(model.spec, model.recipe)
    for half in ("gptq", "onnx"):
        written = sum(entry.size for entry in manifest.half_files(half).values())
        assert predicted[half] == pytest.approx(written, rel=0.25)


def test_a_quantized_model_is_gone_from_memory_maps_and_descriptors(whole: Path) -> None:
    weights = open_artifact(whole).weights("gptq")
    weights.tensor("model.layers.0.mlp.up_proj.weight")
    target = str((whole / "model.safetensors").resolve())
    assert target not in Path("/proc/self/maps").read_text(encoding="utf-8")
    del weights
    descriptors = [os.readlink(p) for p in Path("/proc/self/fd").iterdir() if p.is_symlink()]
    assert target not in descriptors


def test_an_export_killed_at_random_moments_leaves_the_previous_artifact(
    make_tiny_model: Callable[..., Path], rtn_model: Make, tmp_path: Path
) -> None:
    """The whole writer, killed by another process: at its first, its second, ... progress report."""
    out = tmp_path / "out"
    write_artifact(rtn_model(), out, formats=["gptq"])
    before = open_artifact(out).digest
    script = (
        "import importlib.util, sys; from pathlib import Path\n"
        "spec = importlib.util.spec_from_file_location('helpers', sys.argv[1])\n"
        "helpers = importlib.util.module_from_spec(spec); spec.loader.exec_module(helpers)\n"
        "from nybble.export import write_artifact; from nybble.quant.recipe import Recipe\n"
        "model = helpers.quantize_with_rtn(Path(sys.argv[2]), Recipe(bits=8, group_size=32))\n"
        "def progress(*call):\n"
        "    print('step', flush=True)\n"
        "    sys.stdin.readline()\n"
        "write_artifact(model, Path(sys.argv[3]), overwrite=True, formats=['gptq'], progress=progress)\n"
    )
    helpers = Path(__file__).parent / "conftest.py"
    command = [sys.executable, "-c", script, str(helpers), str(make_tiny_model()), str(out)]
    for steps in (1, 7, 16, 20):
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdin is not None
        assert process.stdout is not None
        for _ in range(steps):
            assert process.stdout.readline() == "step\n"
            process.stdin.write("\n")
            process.stdin.flush()
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert open_artifact(out).digest == before
        assert verify_files(out) == []
    write_artifact(rtn_model(bits=8), out, formats=["gptq"], overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
