"""Resident memory, watched from outside: loading never holds more than running."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from memory_trace import Trace, trace

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")

CHILD = """
import sys
from nybble import LLM, SamplingParams

path, cache = sys.argv[1], sys.argv[2] == "cache"
with LLM(path, executor="cpu", threads=2, max_model_len=512, max_sequences=1, cache=cache) as llm:
    print("loaded", flush=True)
    prompt = [3 + i % 500 for i in range(480)]
    llm.generate([prompt], SamplingParams(temperature=0.8, max_tokens=32, ignore_eos=True))
    llm.score(prompt)
print("ended", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("model", ["artifact", "gguf"])
def test_no_start_holds_more_than_the_run_after_it(request: Any, tmp_path: Path, model: str) -> None:
    path = "smollm2" if model == "gguf" else str(request.getfixturevalue("smollm2").path)
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    if model == "artifact":
        path = linked_without_cache(Path(path), tmp_path / "copy")

    def start(cache: str) -> Trace:
        return trace([sys.executable, "-c", CHILD, path, cache], environment)

    first, second, uncached = start("cache"), start("cache"), start("none")
    for found in (first, second, uncached):
        assert found.peak(end="loaded") <= found.peak(begin="loaded") + 3_000_000
    for found in (first, uncached):
        assert abs(found.peak() - second.peak()) <= 8_000_000


def linked_without_cache(artifact: Path, copy: Path) -> str:
    """The same artifact, its files linked, in which nothing has been packed."""
    for file in artifact.rglob("*"):
        place = copy / file.relative_to(artifact)
        if file.is_file() and "cache" not in place.parts:
            place.parent.mkdir(parents=True, exist_ok=True)
            os.link(file, place)
    return str(copy)
