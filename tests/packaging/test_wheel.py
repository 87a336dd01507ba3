"""A wheel built from the sources installs and runs elsewhere, with a C++ compiler and without one."""

import json
import os
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from shared import made_once
from wheels import install, pip_wheel

ROOT = Path(__file__).parents[2]
ROOMS = ("models", "quant", "export", "kvcache", "devices", "runtime")


@dataclass(frozen=True)
class Built:
    """What a build left: the wheel's path, and every file in it."""

    path: Path
    names: frozenset[str]
    sources: frozenset[str]  # the Python files there were before the build, by their names in a wheel


def python_sources() -> frozenset[str]:
    found = {
        f"nybble/{p.relative_to(ROOT / 'face' / 'nybble')}" for p in (ROOT / "face" / "nybble").rglob("*.py")
    }
    for room in ROOMS:
        found |= {f"nybble/{room}/{p.relative_to(ROOT / room)}" for p in (ROOT / room).rglob("*.py")}
    return frozenset(name.replace(os.sep, "/") for name in found)


def build(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """`pip wheel` into `folder`, with nothing of this environment that decides how the extension is built."""
    clean = {k: v for k, v in os.environ.items() if k not in ("NYBBLE_REQUIRE_KERNELS", "CXX", "CMAKE_ARGS")}
    # What is in it does not depend on this, and the installation that runs the tests is optimized.
    fast = ["cmake.define.CMAKE_CXX_FLAGS_RELEASE=-O0 -DNDEBUG"]
    return pip_wheel(folder, fast, environment=clean | environment)


def built(factory: pytest.TempPathFactory, name: str, environment: Callable[[Path], dict[str, str]]) -> Built:
    """A wheel that is built once, in the environment for its folder."""

    def make(folder: Path) -> None:
        (folder / "sources.json").write_text(json.dumps(sorted(python_sources())))
        result = build(folder, **environment(folder))
        assert result.returncode == 0, result.stdout + result.stderr

    folder = made_once(factory, name, make)
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        names = frozenset(archive.namelist())
    return Built(path, names, frozenset(json.loads((folder / "sources.json").read_text())))


def no_compiler(folder: Path) -> dict[str, str]:
    """An environment in which CMake is found and a C++ compiler is not."""
    tools = folder / "tools"
    tools.mkdir()
    for tool in ("cmake", "ninja", "make"):
        if found := shutil.which(tool):
            (tools / tool).symlink_to(Path(found).resolve())
    return {"PATH": str(tools), "CXX": "/bin/false", "CC": "/bin/false"}


@pytest.fixture(scope="module")
def kernel_wheel(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return built(tmp_path_factory, "kernel-wheel", lambda folder: {"NYBBLE_REQUIRE_KERNELS": "1"})


@pytest.fixture(scope="module")
def pure_wheel(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return built(tmp_path_factory, "pure-wheel", no_compiler)


FOUND = """
import importlib, json, pkgutil
import nybble
from nybble.devices import describe, list_profiles, probe
machine = probe(providers=False)
print(json.dumps({
    "file": nybble.__file__,
    "rooms": sorted(m.name for m in pkgutil.iter_modules(nybble.__path__) if m.ispkg),
    "profiles": [p.name for p in list_profiles()],
    "kernels": machine.kernels,
    "isa": machine.isa,
    "rows": dict(describe(machine)),
}))
"""


def run_installed(wheel: Built, folder: Path) -> dict[str, object]:
    scripts = install(wheel.path, folder / "environment")
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    result = subprocess.run(
        [str(scripts / "python"), "-c", FOUND],
        cwd=elsewhere,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found: dict[str, object] = json.loads(result.stdout)
    assert str(found["file"]).startswith(str(folder)), "the test ran another installation"
    for arguments in (["--version"], ["devices"]):
        command = subprocess.run(
            [str(scripts / "nybble"), *arguments],
            cwd=elsewhere,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert command.returncode == 0, command.stderr
    return found


@pytest.mark.parametrize("kind", ["kernel_wheel", "pure_wheel"])
def test_a_wheel_holds_the_package_and_nothing_else(kind, request):
    wheel: Built = request.getfixturevalue(kind)
    assert wheel.sources <= wheel.names
    assert "nybble/py.typed" in wheel.names
    profiles = {f"nybble/devices/profiles/{p.name}" for p in (ROOT / "devices" / "profiles").glob("*.toml")}
    assert profiles
    assert profiles <= wheel.names
    top = {name.split("/")[0] for name in wheel.names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"nybble"}
    assert any(name.endswith("licenses/LICENSE") for name in wheel.names)
    kept = (".py", ".pyi", ".typed", ".toml", ".so", ".pyd")
    assert not [n for n in wheel.names if n.startswith("nybble/") and not n.endswith(kept)]
    assert not [n for n in wheel.names if "tests" in n.split("/") or "/test_" in n]


def test_a_wheel_with_kernels_runs_outside_the_source_tree(kernel_wheel, tmp_path):
    assert not kernel_wheel.path.name.endswith("-any.whl")
    found = run_installed(kernel_wheel, tmp_path)
    assert found["kernels"] is True
    assert set(ROOMS) <= set(found["rooms"])
    assert "raspberry-pi-5" in found["profiles"]


def test_the_extension_holds_no_path_of_the_machine_that_built_it(kernel_wheel):
    with zipfile.ZipFile(kernel_wheel.path) as archive:
        (name,) = [
            n for n in archive.namelist() if n.startswith("nybble/_kernels") and not n.endswith(".pyi")
        ]
        assert str(ROOT).encode() not in archive.read(name)


def test_without_a_compiler_a_pure_wheel_is_built_and_runs(pure_wheel, tmp_path):
    assert pure_wheel.path.name.endswith("-py3-none-any.whl")
    assert not [n for n in pure_wheel.names if n.endswith((".so", ".pyd"))]
    found = run_installed(pure_wheel, tmp_path)
    assert found["kernels"] is False
    assert found["rows"]["C++ kernels"].startswith("not installed")
    assert set(ROOMS) <= set(found["rooms"])


def test_without_a_compiler_required_kernels_fail_the_build(tmp_path):
    result = build(tmp_path, NYBBLE_REQUIRE_KERNELS="1", **no_compiler(tmp_path))
    assert result.returncode != 0
    assert "CMake configuration failed" in result.stdout + result.stderr
    assert not list(tmp_path.glob("*.whl"))
