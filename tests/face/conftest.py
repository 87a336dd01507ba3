"""The command line in this process, and artifacts made with it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from nybble.cli import main


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line a failed command prints on standard error, after its progress."""
        lines = [line for line in self.err.splitlines() if line.startswith("nybble: error: ")]
        assert len(lines) == 1, self.err
        assert self.err.endswith(lines[0] + "\n"), self.err
        assert "Traceback" not in self.err
        return lines[0].removeprefix("nybble: error: ")


@pytest.fixture
def nybble(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """`nybble("info", path) -> Result`: runs a command as the shell would."""

    def run(*args: str | Path) -> Result:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(a) for a in args])
        captured = capsys.readouterr()
        return Result(int(ended.value.code or 0), captured.out, captured.err)

    return run


SMALL = ("--samples", "4", "--seq-len", "64")
# Plain GPTQ: what the default recipe adds needs more text than this.
PLAIN = ("--group-size", "64", "--sym", "--correction", "0", "--no-weigh-tokens", "--sweeps", "0")


@pytest.fixture(scope="session")
def tiny_artifact(make_tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama quantized by the command, both halves. Tests must not change it."""
    out = tmp_path_factory.mktemp("artifact") / "tiny"
    with pytest.raises(SystemExit) as ended:
        main(["quantize", str(make_tiny_model()), "-o", str(out), *PLAIN, *SMALL])
    assert not ended.value.code
    return out
