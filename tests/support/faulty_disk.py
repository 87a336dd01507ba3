"""A model whose disk fails, stalls and recovers: run with `faulty_reads` preloaded.

`python faulty_disk.py ARTIFACT` prints a line of JSON for each fault: the error that the requests of that
moment got, and whether the next one gave what it gave before.
"""

import errno
import json
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from nybble import LLM, SamplingParams
from nybble.devices.residency import ResidencyPlan
from nybble.errors import ExecutorError
from nybble.runtime.cpu_executor import CpuExecutor

HOW = Path(os.environ["FAULTY_HOW"])
PROMPT = "The statement"
FAULTS = (f"fail {errno.EIO}", "short 100", "stall", f"fail {errno.ENXIO}")


def say(how: str) -> None:
    """What reads do from now on; at once, since a half-written file would be another fault."""
    new = HOW.with_suffix(".new")
    new.write_text(how)
    new.replace(HOW)


def stream_everything(layers: int) -> None:
    """From now on executors are made so, with a short time limit."""
    streamed = {"residency": ResidencyPlan.spread(layers, layers, streamed_head=True), "read_timeout": 0.3}
    from_packed: Any = CpuExecutor.from_packed
    CpuExecutor.from_packed = lambda *args, **kwargs: from_packed(*args, **{**kwargs, **streamed})


def tokens(llm: LLM) -> list[int]:
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    return list(llm.generate(PROMPT, params).token_ids)


def main(artifact: str) -> None:
    stream_everything(layers=2)
    say("pass")
    llm = LLM(artifact, threads=2, speculation="off")
    expected = tokens(llm)
    for how in FAULTS:
        say(how)
        errors: list[str] = []

        def request(errors: list[str] = errors) -> None:
            try:
                tokens(llm)
            except ExecutorError as error:
                errors.append(str(error))

        together = [threading.Thread(target=request) for _ in range(2)]
        for thread in together:
            thread.start()
        for thread in together:
            thread.join()
        say("pass")
        print(json.dumps({"how": how, "errors": errors, "same after": tokens(llm) == expected}), flush=True)
    say("stall")
    with suppress(ExecutorError):
        tokens(llm)
    llm.close()  # while a read is stuck
    print(json.dumps({"closed": True}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
