"""Hub ids, found in a Hugging Face cache laid out by hand and looked at by Hugging Face's own library."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from nybble.errors import ModelFormatError
from nybble.models import open_source
from nybble.models.hub_cache import cache_folder, located

ID = "some-org/Tiny_model.v1"
OLD, NEW = "0" * 40, "a1" * 20


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_tiny_model: Callable[..., Path]) -> Path:
    """A llama at an old commit, of branch `before`; a qwen2 at that of `main` and of a pull request."""
    folder = tmp_path / "hub"
    repository = folder / "models--some-org--Tiny_model.v1"
    refs = {"before": OLD, "main": NEW, "refs/pr/3": NEW}
    for commit, family in ((OLD, "llama"), (NEW, "qwen2")):
        snapshot = repository / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (repository / "blobs").mkdir(exist_ok=True)
        for file in make_tiny_model(family).iterdir():
            blob = repository / "blobs" / f"{family}-{file.name}"
            blob.write_bytes(file.read_bytes())
            (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    for name, commit in refs.items():
        (repository / "refs" / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / "refs" / name).write_text(commit)
    monkeypatch.setenv("HF_HUB_CACHE", str(folder))
    return folder


@pytest.mark.parametrize("revision", [None, "main", "before", "refs/pr/3", OLD, NEW])
def test_an_id_is_the_folder_that_huggingfaces_library_finds(cache: Path, revision: str | None) -> None:
    from huggingface_hub import snapshot_download

    theirs = snapshot_download(ID, revision=revision, cache_dir=cache, local_files_only=True)
    ours = located(ID if revision is None else f"{ID}@{revision}")
    assert os.path.samefile(ours, theirs)


def test_the_layout_of_this_test_is_theirs(cache: Path) -> None:
    from huggingface_hub import scan_cache_dir

    found = scan_cache_dir(cache)
    assert not found.warnings
    (repository,) = found.repos
    assert repository.repo_id == ID
    assert {revision.commit_hash for revision in repository.revisions} == {OLD, NEW}


def test_an_id_opens_as_the_folder_does(cache: Path, make_tiny_model: Callable[..., Path]) -> None:
    expected = open_source(make_tiny_model("qwen2"))
    found = open_source(ID)
    try:
        assert found.origin == ID
        assert found.digest == expected.digest
        assert found.spec.model_type == "qwen2"
        assert (found.tensor("model.norm.weight") == expected.tensor("model.norm.weight")).all()
    finally:
        found.close()
        expected.close()


def test_a_path_goes_first(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ID).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert located(ID) == ID
    assert located(Path(ID)) == Path(ID)


def test_a_repository_of_one_gguf_file_is_that_file(cache: Path) -> None:
    snapshot = cache / "models--some-org--gguf" / "snapshots" / NEW
    snapshot.mkdir(parents=True)
    (snapshot / "model-q4.gguf").write_bytes(b"GGUF")
    assert located(f"some-org/gguf@{NEW}") == snapshot / "model-q4.gguf"
    (snapshot / "model-q8.gguf").write_bytes(b"GGUF")
    assert located(f"some-org/gguf@{NEW}") == snapshot


@pytest.mark.parametrize(
    ("src", "expected"),
    [
        ("other-org/model", "nor a model in the Hugging Face cache"),
        ("other-org/model", "`hf download other-org/model` does"),
        (f"{ID}@after", f"has no revision 'after'; nothing is downloaded here: `hf download {ID} --revision"),
        (f"{ID}@{'b' * 40}", "has no revision 'bbbb"),
    ],
)
def test_what_is_not_cached_is_said_in_one_line(cache: Path, src: str, expected: str) -> None:
    with pytest.raises(ModelFormatError) as caught:
        open_source(src)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "src",
    ["gpt2", "../up/there", "a/../b", "a--b/c", "/absolute/path", "a/b/c", "a/b@", "a/b@/etc", "x" * 300],
)
def test_what_is_no_id_is_left_to_its_own_error(cache: Path, src: str) -> None:
    assert located(src) == src
    with pytest.raises(ModelFormatError, match="no such file or folder"):
        open_source(src)


def test_a_damaged_ref_is_named(cache: Path) -> None:
    ref = cache / "models--some-org--Tiny_model.v1" / "refs" / "main"
    for content in ("../../..", "", "x" * 90):
        ref.write_text(content)
        with pytest.raises(ModelFormatError, match="refs/main: holds"):
            located(ID)
    ref.write_bytes(b"x" * 1000)
    with pytest.raises(ModelFormatError, match="refs/main: 1000 bytes"):
        located(ID)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"XDG_CACHE_HOME": "/xdg"},
        {"HF_HOME": "~/hf"},
        {"HF_HOME": "/hf", "XDG_CACHE_HOME": "/xdg"},
        {"HF_HUB_CACHE": "$HOME/hub", "HF_HOME": "/hf"},
        {"HUGGINGFACE_HUB_CACHE": "/older", "HF_HOME": "/hf"},
        {"HUGGINGFACE_HUB_CACHE": "/older", "HF_HUB_CACHE": "/hub"},
    ],
    ids=str,
)
def test_the_cache_is_where_huggingfaces_library_has_it(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import subprocess
    import sys

    for name in ("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code = "from huggingface_hub import constants; print(constants.HF_HUB_CACHE)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert str(cache_folder()) == run.stdout.strip()
