"""Wheels built from this checkout, and environments to run them in."""

import os
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def pip_wheel(
    folder: Path, settings: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`pip wheel` into `folder`, off the network and away from the checkout's own build folder, with
    `settings` of scikit-build-core."""
    command = [sys.executable, "-m", "pip", "wheel", str(ROOT), "--wheel-dir", str(folder)]
    command += ["--no-deps", "--no-build-isolation", "--no-index"]
    for setting in (f"build-dir={folder / 'build'}", *settings):
        command += ["--config-settings", setting]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def install(wheel: Path, folder: Path) -> Path:
    """A fresh environment with the wheel in it, which finds dependencies in this one. Returns its `bin`."""
    venv.create(folder, with_pip=False, symlinks=True)
    scripts = folder / ("Scripts" if os.name == "nt" else "bin")
    command = [sys.executable, "-m", "pip", "--python", str(scripts / "python"), "install"]
    subprocess.run([*command, "--no-deps", "--no-index", str(wheel)], check=True, capture_output=True)
    (site,) = folder.glob("lib/python*/site-packages")
    # A path in a .pth file brings its packages, but not its own .pth files: no editable install of Nybble.
    paths = [path for path in sys.path if path.endswith("site-packages")]
    (site / "dependencies.pth").write_text("\n".join(paths) + "\n", encoding="utf-8")
    return scripts
