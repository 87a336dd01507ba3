"""A model whose streamed weights cannot be read fails the requests of that moment, says why, and goes on."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nybble import quantize

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture(scope="module")
def faulty_reads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that is preloaded."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler to build the faulty reads with")
    library = tmp_path_factory.mktemp("faulty") / "faulty_reads.so"
    command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", str(SUPPORT / "faulty_reads.cpp")]
    subprocess.run([*command, "-o", str(library), "-ldl"], check=True)
    return library


@pytest.fixture(scope="module")
def mixture(make_tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("mixture") / "artifact"
    folder = make_tiny_model("mixtral", num_local_experts=6)
    quantize(folder, out, method="rtn", group_size=32, formats=["gptq"])
    return out


@pytest.fixture(
    scope="module",
    params=[(reads, slots) for reads in ("asynchronous", "synchronous") for slots in (0, 3)],
    ids=lambda param: f"{param[0]}, {f'experts in {param[1]} slots' if param[1] else 'all streamed'}",
)
def reports(
    request: pytest.FixtureRequest,
    faulty_reads: Path,
    tiny_artifact: Path,
    mixture: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, dict[str, object]]:
    """What the child reported, by fault; its end under "closed". With asynchronous reads, where this system
    has them, and with threads that read; with all weights streamed, and with experts alone."""
    reads, slots = request.param
    folder = tmp_path_factory.mktemp("faulty")
    artifact = folder / "artifact"
    shutil.copytree(mixture if slots else tiny_artifact, artifact)
    environment = {
        **os.environ,
        "LD_PRELOAD": str(faulty_reads),
        "FAULTY_FILE": "/packed.bin",
        "FAULTY_HOW": str(folder / "how"),
    }
    if reads == "synchronous":
        environment["FAULTY_SYNCHRONOUS"] = "1"
    ran = subprocess.run(
        [sys.executable, str(SUPPORT / "faulty_disk.py"), str(artifact), str(slots)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,  # nothing hangs
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    asynchronous = (folder / "how.asynchronous").exists()
    if reads == "synchronous":
        assert not asynchronous
    elif not asynchronous:
        pytest.skip("this system has no asynchronous reads of this file")
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    what = "expert " if slots else ""
    return {str(line.get("how", "closed")): line | {"what": what} for line in lines}


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("fail 5", "Input/output error"),
        ("short 100", "only 100 of "),
        ("stall", "no read has ended for 0.3 s"),
        ("fail 6", "No such device or address"),
    ],
)
def test_the_requests_of_that_moment_fail_and_the_next_one_runs(
    reports: dict[str, dict[str, object]], how: str, says: str
) -> None:
    report = reports[how]
    errors = report["errors"]
    assert isinstance(errors, list)
    assert len(errors) == 2
    for error in errors:
        assert f"/packed.bin: reading {report['what']}" in error
        assert says in error
        assert "\n" not in error
    assert report["same after"]


def test_a_process_that_was_stopped_finds_its_reads(reports: dict[str, dict[str, object]]) -> None:
    """What stops it (a terminal's Ctrl-Z) takes longer than a read may."""
    assert reports["stopped"]["error"] is None


def test_a_model_closes_while_a_read_is_stuck(reports: dict[str, dict[str, object]]) -> None:
    assert reports["closed"]["closed"]
