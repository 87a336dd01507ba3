"""The release's wheels: auditwheel takes them; an old x86-64 CPU and AArch64 compute this machine's bits.

Both are built by `scripts/build_wheels.py`. The other machines are emulated; AArch64's Python and what Nybble
depends on come from Debian and PyPI, so those tests are skipped where there is no network.
"""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from debian_root import DebianRootError, unpack
from decoders import MIXED
from wheels import ROOT, install

from nybble import quantize

SCRIPT = ROOT / "scripts" / "build_wheels.py"
COMPUTED = ROOT / "tests" / "support" / "computed.py"
DEBIAN_WITH_PYTHON = {(3, 11): "bookworm", (3, 13): "trixie"}
OLDEST_GLIBC = 17  # pip takes wheels for any C library from 2.17 up to its own

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="builds on x86-64 for AArch64"),
]


@dataclass(frozen=True)
class Machine:
    """How to run a Python that has the wheel installed, on the machine it is for or an emulation of it."""

    python: list[str]
    environment: dict[str, str]
    folder: Path  # where Nybble is installed

    def run(self, *arguments: str | Path) -> str:
        result = subprocess.run(
            [*self.python, *map(str, arguments)],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    def compute(self, artifact: Path, *isa: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.run(COMPUTED, artifact, *isa))
        assert Path(found["file"]).is_relative_to(self.folder), "the test ran another installation"
        return found


def found(tool: str) -> str:
    path = shutil.which(tool)
    if path is None:
        pytest.skip(f"{tool} is not installed")
    return path


def clean_environment(**more: str) -> dict[str, str]:
    """Without what would bring this installation, or tell OpenBLAS that it runs on another CPU."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "NYBBLE_REQUIRE_KERNELS") and not name.startswith("OPENBLAS_")
    }
    return kept | more


def built(architecture: str, folder: Path) -> Path:
    command = [sys.executable, str(SCRIPT), architecture, "--output", str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def x86_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("x86_64", tmp_path_factory.mktemp("x86_64"))


@pytest.fixture(scope="module")
def arm_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found("aarch64-linux-gnu-g++")
    return built("aarch64", tmp_path_factory.mktemp("aarch64"))


@pytest.fixture(scope="module")
def artifact(make_tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two window groups, biases, tied embeddings, a short last group; rounded to nearest."""
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    model = make_tiny_model(
        "qwen2", use_sliding_window=True, tie_word_embeddings=True, rope_parameters=rope, **MIXED
    )
    out = tmp_path_factory.mktemp("artifact") / "tiny"
    quantize(model, out, method="rtn", group_size=64, symmetric=False, formats=("gptq",))
    return out


@pytest.fixture(scope="module")
def old_machine(x86_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """A CPU of 2008, which has what NumPy's wheels need (x86-64-v2) and no AVX."""
    emulator = found("qemu-x86_64")
    folder = tmp_path_factory.mktemp("nehalem").resolve()
    python = install(x86_wheel, folder / "environment") / "python"
    return Machine([emulator, "-cpu", "Nehalem", str(python)], clean_environment(), folder)


@pytest.fixture(scope="module")
def arm_machine(arm_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Machine:
    emulator = found("qemu-aarch64")
    version = sys.version_info[:2]
    if version not in DEBIAN_WITH_PYTHON:
        pytest.skip(f"no Debian release has Python {version[0]}.{version[1]} for AArch64")
    try:
        root = unpack(
            ROOT / "build" / "arm64-python",
            DEBIAN_WITH_PYTHON[version],
            "arm64",
            [f"python{version[0]}.{version[1]}", "libstdc++6"],
        )
    except DebianRootError as error:
        pytest.skip(f"AArch64's Python: {error}")
    site = tmp_path_factory.mktemp("aarch64-site").resolve()
    result = pip_for_arm(site, "--no-index", "--no-deps", arm_wheel)
    assert result.returncode == 0, result.stderr
    dependencies = [
        line.split(";")[0].removeprefix("Requires-Dist: ")
        for metadata in site.glob("nybble-*.dist-info/METADATA")
        for line in metadata.read_text(encoding="utf-8").splitlines()
        if line.startswith("Requires-Dist: ") and "extra ==" not in line
    ]
    assert dependencies
    result = pip_for_arm(site, *dependencies)
    if result.returncode != 0:
        pytest.skip(f"what Nybble depends on, for AArch64: {result.stderr.strip().splitlines()[-1]}")
    python = root / "usr" / "bin" / f"python{version[0]}.{version[1]}"
    environment = clean_environment(PYTHONPATH=str(site), QEMU_LD_PREFIX=str(root))
    return Machine([emulator, "-cpu", "max", str(python)], environment, site)


def pip_for_arm(site: Path, *what: str | Path) -> subprocess.CompletedProcess[str]:
    """pip as it would choose wheels on an AArch64 machine with a C library of 2.36."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(site)]
    command += ["--only-binary", ":all:", "--implementation", "cp"]
    command += ["--python-version", f"{sys.version_info[0]}.{sys.version_info[1]}"]
    for minor in range(OLDEST_GLIBC, 37):
        command += ["--platform", f"manylinux_2_{minor}_aarch64"]
    command += ["--platform", "manylinux2014_aarch64"]
    return subprocess.run([*command, *map(str, what)], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("architecture", ["x86_64", "aarch64"])
def test_auditwheel_takes_the_wheel(architecture: str, request: pytest.FixtureRequest) -> None:
    wheel: Path = request.getfixturevalue("x86_wheel" if architecture == "x86_64" else "arm_wheel")
    command = [sys.executable, "-m", "auditwheel", "show", str(wheel)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    tag = re.search(rf'platform tag:\s+"(manylinux_2_\d+_{architecture})"', shown)
    assert tag, shown
    assert wheel.name.endswith(f"-{tag[1]}.whl")


def test_an_old_x86_cpu_gives_the_bits_of_this_one(old_machine: Machine, artifact: Path) -> None:
    here = json.loads(subprocess.check_output([sys.executable, COMPUTED, artifact]))
    there = old_machine.compute(artifact)
    assert there["kernels"] == ["scalar"]
    assert (there["logits"], there["answer"]) == (here["logits"], here["answer"])


def test_an_old_x86_cpu_lists_its_devices(old_machine: Machine) -> None:
    shown = old_machine.run("-m", "nybble", "devices")
    assert re.search(r"C\+\+ kernels\s+scalar \(of scalar\)", shown)
    assert "avx" not in re.search(r"Instruction sets.*", shown)[0]


def test_aarch64_gives_the_bits_of_scalar_on_x86(arm_machine: Machine, artifact: Path) -> None:
    here = json.loads(subprocess.check_output([sys.executable, COMPUTED, artifact, "scalar"]))
    there = arm_machine.compute(artifact)
    assert there["kernels"] == ["neondot", "scalar"]
    assert (there["logits"], there["answer"]) == (here["logits"], here["answer"])


def test_aarch64_lists_its_devices(arm_machine: Machine) -> None:
    shown = arm_machine.run("-m", "nybble", "devices")
    assert re.search(r"C\+\+ kernels\s+neondot \(of neondot, scalar\)", shown)
    assert re.search(r"System\s+Linux aarch64", shown)


def test_what_can_not_be_built_is_one_line() -> None:
    command = [sys.executable, str(SCRIPT), "pdp11"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.splitlines() == [
        "build_wheels.py: can't build for pdp11 here; expected x86_64 or aarch64"
    ]


def test_a_missing_compiler_is_named_with_its_package(tmp_path: Path) -> None:
    """With no program on the PATH but those beside this Python."""
    environment = {**os.environ, "PATH": str(tmp_path)}
    command = [sys.executable, str(SCRIPT), "aarch64", "--output", str(tmp_path / "wheels")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.splitlines() == [
        "build_wheels.py: g++-aarch64-linux-gnu missing; "
        "run: apt-get install g++-aarch64-linux-gnu, or give --install"
    ]
    assert not (tmp_path / "wheels").exists()
