"""A quantization that is killed goes on where it was, to the bytes of one that was not."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nybble import quantize
from nybble.errors import OutputError, SettingError
from nybble.quant import checkpoint

SCRIPT = Path(__file__).parents[1] / "support" / "killed.py"
GPTQ: dict[str, Any] = {"samples": 4, "seq_len": 32, "group_size": 32, "act_order": "dynamic"}
RTN: dict[str, Any] = {"method": "rtn", "group_size": 32}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("settings", [GPTQ, pytest.param(RTN, marks=pytest.mark.slow)], ids=["gptq", "rtn"])
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
    """The layer that a run to its end began with."""
    seen: list[int] = []
    quantize(
        model, out, threads=1,
        progress=lambda stage, done, total: seen.append(done) if stage == "quantize" else None, **settings,
    )  # fmt: skip
    return next((done for done in seen[1:] if done != 1), 0) if seen[1] != 1 else 0


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
def test_two_runs_do_not_share_work(
    make_tiny_model: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The one that comes second keeps nothing, and leaves what the first keeps."""
    model, out = make_tiny_model(num_hidden_layers=4), tmp_path / "out"
    work = stop_after(3, model, out, method="rtn")
    descriptor = checkpoint._locked(work)
    before = contents(work)
    stop_after(2, model, out, method="rtn", resume=True)
    assert "another process works there" in caplog.text
    assert contents(work) == before
    import os

    os.close(descriptor)
