"""A model under random load for a minute, or for twenty: nothing is lost, and nothing grows."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "support" / "soak.py"
KINDS = {"whole", "list", "stream", "dropped", "closed", "awaited", "async stream", "left", "cancelled"}


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc to see the resident memory")
@pytest.mark.parametrize("seconds", [60, pytest.param(1200, marks=pytest.mark.slow)])
def test_a_soak(tiny_artifact: Path, seconds: int) -> None:
    command = [sys.executable, str(SCRIPT), str(tiny_artifact), str(seconds), "1"]
    # It ends by itself, and soon; the limit is for a machine that is busy with something else.
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 600, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["errors"] == []
    assert all(report["counts"].get(kind) for kind in KINDS), report["counts"]
    assert (report["pages_lost"], report["has_work"], report["threads_left"]) == (0, False, [])
    resident = report["resident"]
    assert len(resident) > 10
    assert max(resident) <= 1.02 * min(resident), resident
