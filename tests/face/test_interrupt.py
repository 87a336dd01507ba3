"""Ctrl-C in a process of its own: one line, exit code 130, and nothing half-written."""

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def default_interrupts() -> None:
    """Where the tests run in the background, interrupts are ignored, which a child inherits."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def interrupted(*arguments: str | Path, after: str) -> tuple[int, str, str]:
    """What a command that is interrupted when it has said `after` ends with: its exit code, the rest of its
    standard output, and what it wrote on standard error."""
    command = [sys.executable, "-m", "nybble", *map(str, arguments)]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=default_interrupts,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        said = ""
        watched = process.stderr if after.endswith("\n") else process.stdout
        while not said.endswith(after) if after else not said:
            character = watched.read(1)
            assert character, said + process.stderr.read()
            said += character
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=300)
        return process.returncode, out, (said if watched is process.stderr else "") + err


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_quantize(make_tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    options = ("--samples", "64", "--seq-len", "64", "--sweeps", "100")
    model = make_tiny_model(num_hidden_layers=8)
    code, _, err = interrupted("quantize", model, "-o", tmp_path / "out", *options, after="quantize: 0/8\n")
    assert code == 130
    assert err.splitlines()[1:] == ["nybble: interrupted"]
    assert list(tmp_path.iterdir()) == []


def test_eval(tiny_artifact: Path, tmp_path: Path) -> None:
    artifact = Path(shutil.copytree(tiny_artifact, tmp_path / "artifact"))
    before = files(artifact)
    options = ("--windows", "40", "--window-tokens", "500", "--no-cache", "--save")
    code, out, err = interrupted("eval", artifact, *options, after="\n")
    assert (code, out) == (130, "")
    assert err.splitlines()[0].startswith("text: 1/40")
    assert err.splitlines()[-1] == "nybble: interrupted"
    assert "Traceback" not in err
    assert files(artifact) == before


def test_run(nybble: Callable[..., Any], make_tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    model, artifact = make_tiny_model(max_position_embeddings=8192), tmp_path / "artifact"
    assert nybble("quantize", model, "-o", artifact, "--method", "rtn").code == 0
    options = ("--ignore-eos", "--max-model-len", "8192")
    code, out, err = interrupted("run", artifact, "Say something.", *options, after="")
    assert (code, err) == (130, "nybble: interrupted\n")
    assert out.endswith("\n")
    assert [path for path in tmp_path.iterdir() if path != artifact] == []
