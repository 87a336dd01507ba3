"""Where tests run an installed wheel: a fresh environment that finds its dependencies in this one."""

import os
import subprocess
import sys
import venv
from pathlib import Path


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
