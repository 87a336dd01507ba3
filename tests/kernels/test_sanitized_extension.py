"""The extension under AddressSanitizer and UndefinedBehaviorSanitizer, where malformed arrays reach it."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from wheels import ROOT, install


def libraries() -> list[str]:
    """What is loaded before Python: AddressSanitizer, and the C++ library whose exceptions it watches."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    found = []
    for name in ("libasan.so", "libstdc++.so.6"):
        command = ["g++", f"-print-file-name={name}"]
        found.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
        if not Path(found[-1]).is_absolute():
            pytest.skip(f"g++ has no {name}")
    return found


@pytest.mark.slow
def test_malformed_arrays_are_read_within_their_bounds(sanitized: Path, tmp_path: Path) -> None:
    preloaded = libraries()
    (wheel,) = sanitized.glob("*.whl")
    python = install(wheel, tmp_path / "environment") / "python"

    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(preloaded),
        "ASAN_OPTIONS": "detect_leaks=0",  # those of Python, which frees little at its end
        "PYTHONMALLOC": "malloc",  # so that every object has bounds that are watched
    }
    folder = ROOT / "tests" / "runtime"
    tests = [str(folder / f"test_malformed_{what}.py") for what in ("arrays", "weights")]
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "--capture=sys", *tests]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
