"""Commands that take a model take the hub id of one that is in the local Hugging Face cache."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nybble.models.hub_cache import located

COMMIT = "3c" * 20


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Path], Path]:
    """`cached(id, folder)` puts a folder's files into the cache, and returns the snapshot."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))

    def put(name: str, folder: Path) -> Path:
        repository = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
        snapshot = repository / "snapshots" / COMMIT
        shutil.copytree(folder, repository / "blobs")
        for file in (repository / "blobs").rglob("*"):
            link = snapshot / file.relative_to(repository / "blobs")
            link.parent.mkdir(parents=True, exist_ok=True)
            if file.is_file():
                link.symlink_to(file)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(COMMIT)
        return snapshot

    return put


def test_a_model_is_quantized_planned_and_compared_with(
    cached: Callable[[str, Path], Path],
    make_tiny_model: Callable[..., Path],
    tmp_path: Path,
    nybble: Callable[..., Any],
) -> None:
    cached("org/tiny", make_tiny_model())
    out = tmp_path / "out"
    made = nybble("quantize", "org/tiny", "-o", out, "--method", "rtn", "--formats", "gptq")
    assert made.code == 0, made.err
    assert json.loads((out / "nybble.json").read_text())["source"]["origin"] == "org/tiny"
    assert nybble("plan", "org/tiny", "--device", "raspberry-pi-5").code == 0
    text = tmp_path / "text.txt"
    text.write_text("All that is gold does not glitter. " * 40)
    windows = ("--windows", "2", "--window-tokens", "64", "--device", "laptop-cpu")
    found = nybble("eval", out, "--reference", "org/tiny", "--text", text, "--json", *windows)
    assert found.code == 0, found.err
    assert json.loads(found.out)["comparison"]["top1_agreement"] > 0.5
    assert nybble("quantize", "org/other", "-o", tmp_path / "x").error.startswith("'org/other': no such file")


def test_an_artifact_runs_and_nothing_is_put_into_the_cache(
    cached: Callable[[str, Path], Path], tiny_artifact: Path, tmp_path: Path, nybble: Callable[..., Any]
) -> None:
    snapshot = cached("org/artifact", tiny_artifact)
    shutil.rmtree(snapshot / "cache", ignore_errors=True)
    before = sorted(snapshot.rglob("*"))
    assert located("org/artifact") == snapshot
    assert nybble("info", "org/artifact").code == 0
    verified = nybble("verify", "org/artifact")
    assert verified.code == 0, verified.err
    options = ("--max-tokens", "3", "--device", "laptop-cpu", "--threads", "1")
    ran = nybble("run", f"org/artifact@{COMMIT}", "Hello", *options)
    assert ran.code == 0, ran.err
    assert ran.out == nybble("run", tiny_artifact, "Hello", *options).out
    assert nybble("run", "org/artifact", "Hello", *options, "--executor", "ort").code == 0
    assert sorted(snapshot.rglob("*")) == before
    assert list((tmp_path / "user" / "nybble").glob("*packed.bin"))
    assert "has no revision 'v2'" in nybble("run", "org/artifact@v2", "Hello").error
