"""Scripts that run in another package's own environment."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any


def run_cases(python: str, script: Path, cases: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """What `script` prints about each case, a line of JSON after RESULT, run by `python` in `folder`."""
    cases_file = folder / "cases.json"
    cases_file.write_text(json.dumps(cases), encoding="utf-8")
    # GPTQModel does not start with fewer workers than two.
    environment = {**os.environ, "GPTQMODEL_CPU_WORKERS": "2", "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(
        [python, str(script), str(cases_file)],
        capture_output=True, text=True, env=environment, cwd=folder, check=False,
    )  # fmt: skip
    results = [
        json.loads(x.removeprefix("RESULT ")) for x in run.stdout.splitlines() if x.startswith("RESULT ")
    ]
    assert len(results) == len(cases), run.stdout[-2000:] + run.stderr[-4000:]
    return results
