"""A model whose disk fails, stalls and recovers: run with `faulty_reads` preloaded.

`python faulty_disk.py ARTIFACT SLOTS` prints a line of JSON for each fault: the error that the requests of
that moment got, and whether the next one gave what it gave before. With SLOTS nothing is streamed but
experts, into so many slots; with 0 all is.
"""

import errno
import json
import os
import subprocess
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


def open_streamed(artifact: str, slots: int, read_timeout: float) -> LLM:
    """A model of two layers, all of it streamed, or its experts."""
    plan = ResidencyPlan(2, expert_slots=slots) if slots else ResidencyPlan.spread(2, 2, streamed_head=True)
    streamed = {"residency": plan, "read_timeout": read_timeout}
    from_packed: Any = CpuExecutor.from_packed
    try:
        CpuExecutor.from_packed = lambda *args, **kwargs: from_packed(*args, **{**kwargs, **streamed})
        return LLM(artifact, threads=2, speculation="off")
    finally:
        CpuExecutor.from_packed = from_packed


def run_while_stopped(llm: LLM) -> str | None:
    """A request whose reads stall while the whole process is stopped for longer than they may; its error."""
    say("stall")
    new = HOW.with_suffix(".later")
    new.write_text("pass")
    commands = f"sleep 0.2; kill -STOP {os.getpid()}; sleep 3; mv {new} {HOW}; kill -CONT {os.getpid()}"
    with subprocess.Popen(["sh", "-c", commands]):
        try:
            tokens(llm)
        except ExecutorError as error:
            return str(error)
    return None


def tokens(llm: LLM) -> list[int]:
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    return list(llm.generate(PROMPT, params).token_ids)


def main(artifact: str, slots: int) -> None:
    say("pass")
    with open_streamed(artifact, slots, read_timeout=2.0) as llm:
        tokens(llm)
        print(json.dumps({"how": "stopped", "error": run_while_stopped(llm)}), flush=True)
    llm = open_streamed(artifact, slots, read_timeout=0.3)
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
    main(sys.argv[1], int(sys.argv[2]))
