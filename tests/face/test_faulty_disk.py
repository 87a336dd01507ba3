"""A model whose streamed weights cannot be read fails the requests of that moment, says why, and goes on."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.fixture(scope="module", params=["asynchronous", "synchronous"])
def reports(
    request: pytest.FixtureRequest,
    faulty_reads: Path,
    tiny_artifact: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, dict[str, object]]:
    """What the child reported, by fault; its end under "closed". With asynchronous reads, where this system
    has them, and with threads that read."""
    folder = tmp_path_factory.mktemp("faulty")
    artifact = folder / "artifact"
    shutil.copytree(tiny_artifact, artifact)
    environment = {
        **os.environ,
        "LD_PRELOAD": str(faulty_reads),
        "FAULTY_FILE": "/packed.bin",
        "FAULTY_HOW": str(folder / "how"),
    }
    if request.param == "synchronous":
        environment["FAULTY_SYNCHRONOUS"] = "1"
    ran = subprocess.run(
        [sys.executable, str(SUPPORT / "faulty_disk.py"), str(artifact)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,  # nothing hangs
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    asynchronous = (folder / "how.asynchronous").exists()
    if request.param == "synchronous":
        assert not asynchronous
    elif not asynchronous:
        pytest.skip("this system has no asynchronous reads of this file")
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    return {str(line.get("how", "closed")): line for line in lines}


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
        assert "/packed.bin: reading " in error
        assert says in error
        assert "\n" not in error
    assert report["same after"]


def test_a_process_that_was_stopped_finds_its_reads(reports: dict[str, dict[str, object]]) -> None:
    """What stops it (a terminal's Ctrl-Z) takes longer than a read may."""
    assert reports["stopped"]["error"] is None


def test_a_model_closes_while_a_read_is_stuck(reports: dict[str, dict[str, object]]) -> None:
    assert reports["closed"]["closed"]
