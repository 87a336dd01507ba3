"""A quantization that is killed goes on where it was, to the bytes of one that was not."""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from nybble import quantize
from nybble.errors import OutputError, SettingError
from nybble.quant import budget, checkpoint

SCRIPT = Path(__file__).parents[1] / "support" / "killed.py"
GPTQ: dict[str, Any] = {"samples": 4, "seq_len": 32, "group_size": 32, "act_order": "dynamic"}
RTN: dict[str, Any] = {"method": "rtn", "group_size": 32}
SCALED: dict[str, Any] = {"recipe": "fast", "seq_len": 32}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize(
    "settings",
    [GPTQ, pytest.param(RTN, marks=pytest.mark.slow), pytest.param(SCALED, marks=pytest.mark.slow)],
    ids=["gptq", "rtn", "fast"],
)
def test_killed_at_random_moments_it_ends_with_the_same_bytes(
    settings: dict[str, Any], make_tiny_model: Callable[..., Path], tmp_path: Path
) -> None:

    model, out = make_tiny_model("qwen2", num_hidden_layers=8), tmp_path / "out"
    quantize(model, tmp_path / "whole", threads=1, **settings)
    run = subprocess.run(
        [sys.executable, str(SCRIPT), str(model), str(out), "3", json.dumps(settings)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    begun = json.loads(run.stdout)
    assert len(begun) > 1
    assert max(layer or 0 for layer in begun) > 1, begun
    assert contents(out) == contents(tmp_path / "whole")
    assert {p.name for p in tmp_path.iterdir()} - {".out.nybble-work"} == {"notes", "out", "whole"}


class Stopped(Exception):
    pass


def stop_after(layers: int, model: Path, out: Path, **settings: Any) -> Path:
    """A run that ends by an exception after some layers. The folder where its work is."""

    def stop(stage: str, done: int, total: int) -> None:
        if stage == "quantize" and done == layers:
            raise Stopped

    with pytest.raises(Stopped):
        quantize(model, out, threads=1, progress=stop, **settings)
    return checkpoint.work_folder(out)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer is kept."""
    monkeypatch.setattr(checkpoint, "SAVE_SECONDS", 0.0)


def begins_with(model: Path, out: Path, **settings: Any) -> int:
    """The layer that a run to its end began with; 0 also for one that began with layer 1."""
    seen: list[int] = []
    quantize(
        model, out, threads=1,
        progress=lambda stage, done, total: seen.append(done) if stage == "quantize" else None, **settings,
    )  # fmt: skip
    return seen[1] if seen[1] != 1 else 0


@pytest.mark.usefixtures("always")
def test_without_resume_it_begins_anew(make_tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    model, out = make_tiny_model(num_hidden_layers=4), tmp_path / "out"
    work = stop_after(3, model, out, method="rtn")
    assert sorted(p.name for p in work.iterdir()) == [
        "key.json", *(f"layer-0000{i}.safetensors" for i in range(3)), "state-00002.safetensors",
    ]  # fmt: skip
    assert begins_with(model, out, method="rtn") == 0
    assert not work.exists()


@pytest.mark.usefixtures("always")
def test_another_run_is_not_gone_on_with(make_tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    model, out = make_tiny_model(num_hidden_layers=4), tmp_path / "out"
    work = stop_after(3, model, out, method="rtn")
    for other, changes, what in (
        (model, {"bits": 8}, "recipe"),
        (model, {"threads": 2}, "number of threads"),
        (make_tiny_model("qwen2", num_hidden_layers=4), {}, "model"),
    ):
        settings: dict[str, Any] = {"method": "rtn", "threads": 1, **changes}
        with pytest.raises(SettingError, match=f"with another {what}; repeat") as caught:
            quantize(other, out, resume=True, **settings)
        assert "\n" not in str(caught.value)
    assert begins_with(model, out, method="rtn", resume=True) == 3
    assert not work.exists()


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("name", ["layer-00001", "state-00002"])
@pytest.mark.parametrize("damage", ["byte", "end", "gone"])
def test_damaged_work_is_not_used(
    make_tiny_model: Callable[..., Path],
    tmp_path: Path,
    name: str,
    damage: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, out = make_tiny_model(num_hidden_layers=4), tmp_path / "out"
    path = stop_after(3, model, out, method="rtn") / f"{name}.safetensors"
    data = bytearray(path.read_bytes())
    if damage == "gone":
        path.unlink()
    elif damage == "end":
        path.write_bytes(data[:-1])
    else:
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    assert begins_with(model, out, method="rtn", resume=True) == 0
    assert "is not used" in caplog.text or (damage, name) == ("gone", "state-00002")
    quantize(model, tmp_path / "whole", threads=1, method="rtn")
    assert contents(out) == contents(tmp_path / "whole")


def test_a_short_run_writes_nothing(make_tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    work = stop_after(1, make_tiny_model(), tmp_path / "out", method="rtn")
    assert not work.exists()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("always")
def test_an_artifact_that_cannot_be_written_leaves_the_work(
    make_tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out = make_tiny_model(num_hidden_layers=4), tmp_path / "out"

    def in_the_way(stage: str, done: int, total: int) -> None:
        if done == total and not out.exists():
            out.mkdir()

    with pytest.raises(OutputError, match="exists already"):
        quantize(model, out, threads=1, method="rtn", progress=in_the_way)
    out.rmdir()
    assert begins_with(model, out, method="rtn", resume=True) == 4


@pytest.mark.usefixtures("always")
def test_work_of_a_run_that_was_killed_when_its_artifact_was_there_is_removed_by_the_next(
    make_tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out = make_tiny_model(num_hidden_layers=4), tmp_path / "out"
    work = checkpoint.work_folder(out)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint.Checkpoint, "finish", lambda self: self.close())
        quantize(model, out, threads=1, method="rtn")
    assert work.is_dir()
    lock = checkpoint._locked(work)
    with pytest.raises(OutputError, match="exists already"):
        quantize(model, out, threads=1, method="rtn", resume=True)
    assert work.is_dir()
    os.close(lock)
    with pytest.raises(OutputError, match="exists already"):
        quantize(model, out, threads=1, method="rtn", resume=True)
    assert not work.exists()
    # What comes after the artifact is work on the next one.
    stop_after(3, model, out, method="rtn", overwrite=True)
    with pytest.raises(OutputError, match="exists already"):
        quantize(model, out, threads=1, method="rtn", resume=True)
    assert begins_with(model, out, method="rtn", overwrite=True, resume=True) == 3
    assert not work.exists()


@pytest.mark.usefixtures("always")
def test_two_runs_do_not_share_work(
    make_tiny_model: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The one that comes second keeps nothing, and leaves what the first keeps, also at its end."""
    model, out = make_tiny_model(num_hidden_layers=4), tmp_path / "out"
    work = stop_after(3, model, out, method="rtn")
    descriptor = checkpoint._locked(work)
    before = contents(work)
    try:
        assert begins_with(model, out, method="rtn", resume=True) == 0
    finally:
        os.close(descriptor)
    assert caplog.text.count("another process works there") == 1
    assert contents(work) == before


@pytest.mark.usefixtures("always")
def test_a_run_owns_its_work_until_the_artifact_is_there(
    make_tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    model, out = make_tiny_model(num_hidden_layers=4), tmp_path / "out"
    owned: list[bool] = []

    def locked(stage: str, done: int, total: int) -> None:
        if stage != "quantize":
            with pytest.raises(BlockingIOError):
                checkpoint._locked(checkpoint.work_folder(out))
            owned.append(True)

    quantize(model, out, threads=1, method="rtn", progress=locked)
    assert owned


@pytest.mark.usefixtures("always")
def test_work_left_by_a_run_that_came_and_went_is_not_mixed_in(
    make_tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    model, out = make_tiny_model(num_hidden_layers=4), tmp_path / "out"

    def another(stage: str, done: int, total: int) -> None:
        if stage == "quantize" and done == 0:
            stop_after(3, model, out, method="rtn", bits=8)
        if stage == "quantize" and done == 2:
            raise Stopped

    with pytest.raises(Stopped):
        quantize(model, out, threads=1, method="rtn", progress=another)
    assert begins_with(model, out, method="rtn", resume=True) == 2
    quantize(model, tmp_path / "whole", threads=1, method="rtn")
    assert contents(out) == contents(tmp_path / "whole")


@contextmanager
def files_no_longer_than(limit: int) -> Iterator[None]:
    """What is written to a file beyond that fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("kept", [0, 2])
def test_a_disk_that_gets_full_leaves_what_was_kept(
    kept: int, make_tiny_model: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing more is kept then, also where there would be room again."""
    model, out = make_tiny_model(num_hidden_layers=6), tmp_path / "out"
    work = checkpoint.work_folder(out)
    with ExitStack() as full:

        def fill(stage: str, done: int, total: int) -> None:
            if stage == "quantize" and done == kept:
                full.enter_context(files_no_longer_than(1000))
            if stage == "quantize" and done == kept + 1:
                full.close()
            if stage == "quantize" and done == kept + 3:
                raise Stopped

        with pytest.raises(Stopped):
            quantize(model, out, threads=1, method="rtn", progress=fill)
    assert caplog.text.count("work is not kept: File too large") == 1
    if kept:
        assert sorted(path.name for path in work.iterdir()) == [
            "key.json", *(f"layer-0000{i}.safetensors" for i in range(kept)),
            f"state-0000{kept - 1}.safetensors",
        ]  # fmt: skip
    else:
        assert not work.exists()
    assert begins_with(model, out, method="rtn", resume=True) == kept
    assert not work.exists()
    quantize(model, tmp_path / "whole", threads=1, method="rtn")
    assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.usefixtures("always")
def test_a_folder_that_holds_something_else_is_no_work(
    make_tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    model, out = make_tiny_model(num_hidden_layers=4), tmp_path / "out"
    (checkpoint.work_folder(out) / "folder" / "inner").mkdir(parents=True)
    assert begins_with(model, out, method="rtn", resume=True) == 0
    assert not checkpoint.work_folder(out).exists()


@pytest.mark.usefixtures("always")
def test_work_that_cannot_be_read_is_not_used(
    make_tiny_model: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, out = make_tiny_model(num_hidden_layers=4), tmp_path / "out"
    work = stop_after(3, model, out, method="rtn")
    (work / "state-00002.safetensors").unlink()
    (work / "state-00002.safetensors").mkdir()
    (work / "state-000x.safetensors").touch()
    assert begins_with(model, out, method="rtn", resume=True) == 0
    assert "after layer 2 is not used" in caplog.text
    assert not work.exists()


@pytest.mark.usefixtures("always")
def test_a_run_stopped_while_it_tunes_has_all_layers(
    make_tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "SAVE_SECONDS", 1e9)
    model, out = make_tiny_model(num_hidden_layers=2), tmp_path / "out"
    settings: dict[str, Any] = {
        "samples": 2,
        "seq_len": 32,
        "tune_epochs": 1,
        "bits": 5.5,
        "formats": ["gptq"],
    }

    def stop(stage: str, done: int, total: int) -> None:
        if stage == "tune":
            raise Stopped

    with pytest.raises(Stopped):
        quantize(model, out, threads=1, progress=stop, **settings)
    monkeypatch.setattr(budget, "sensitivities", None)  # it is not measured a second time
    assert begins_with(model, out, resume=True, **settings) == 2
    monkeypatch.undo()
    quantize(model, tmp_path / "whole", threads=1, **settings)
    assert contents(out) == contents(tmp_path / "whole")
