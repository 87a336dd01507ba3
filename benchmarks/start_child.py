"""One start, timed from inside, for `benchmarks/start.py`: prints seconds of each stage as JSON.

Takes the artifact, the threads, and `time.monotonic()` at the launch. Little is imported before the clock is
read.
"""

import sys
import time

began = time.monotonic()

import nybble._kernels  # noqa: E402, F401
import nybble.loading as loading  # noqa: E402
import nybble.runtime.cpu_executor as cpu_executor  # noqa: E402
import nybble.runtime.packed_cache as packed_cache  # noqa: E402
from nybble import LLM, SamplingParams  # noqa: E402

imported = time.monotonic()
stages: dict[str, float] = {}


def timed(owner: object, name: str, stage: str) -> None:
    """Adds what a function takes to a stage."""
    function = getattr(owner, name)

    def wrapper(*arguments: object, **settings: object) -> object:
        start = time.monotonic()
        try:
            return function(*arguments, **settings)
        finally:
            stages[stage] = stages.get(stage, 0.0) + time.monotonic() - start

    setattr(owner, name, staticmethod(wrapper) if isinstance(owner, type) else wrapper)


timed(loading, "resolve_device", "look at the machine")
timed(loading, "open_runnable", "open the artifact")
timed(loading, "fit_sequences", "plan memory")
timed(loading, "Tokenizer", "tokenizer")
timed(packed_cache, "load_packed", "map and check packed weights")
timed(cpu_executor.CpuExecutor, "from_packed", "decoder")
artifact, threads, launched = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
llm = LLM(artifact, executor="cpu", threads=threads, max_model_len=512, max_sequences=1)
loaded = time.monotonic()
params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
llm.generate([[5 + i for i in range(16)]], params)
ended = time.monotonic()

import json  # noqa: E402

result = {"interpreter": began - launched, "imports": imported - began, **stages}
result["the rest of loading"] = loaded - imported - sum(stages.values())
result["first token of 16"] = ended - loaded
result["total"] = ended - launched
print(json.dumps(result))
