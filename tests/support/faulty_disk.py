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
FAULTS = (f"fail {errno.EIO}", "short 100", f"fail {errno.ENXIO}")
PATIENT, HASTY = 60.0, 0.3  # seconds; a busy disk may well take the second, never the first


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
    commands = f"sleep 0.2; kill -STOP {os.getpid()}; sleep 5; mv {new} {HOW}; kill -CONT {os.getpid()}"
    with subprocess.Popen(["sh", "-c", commands]):
        try:
            tokens(llm)
        except ExecutorError as error:
            return str(error)
    return None


def tokens(llm: LLM) -> list[int]:
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    return list(llm.generate(PROMPT, params).token_ids)


def tokens_once_read(llm: LLM) -> list[int]:
    """The tokens, as soon as the disk is quick enough for a model that does not wait long for it."""
    for _ in range(100):
        try:
            return tokens(llm)
        except ExecutorError as error:
            if "no read has ended" not in str(error):
                raise
    raise RuntimeError("a model whose disk stalled once has never read again")


def report_fault(llm: LLM, how: str, expected: list[int]) -> None:
    """What two requests got while reads were faulty, and whether the next one gave what it should."""
    say(how)
    errors: list[str] = []

    def request() -> None:
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
    same = tokens_once_read(llm) == expected
    print(json.dumps({"how": how, "errors": errors, "same after": same}), flush=True)


def main(artifact: str, slots: int) -> None:
    say("pass")
    with open_streamed(artifact, slots, read_timeout=4.0) as llm:
        tokens_once_read(llm)
        print(json.dumps({"how": "stopped", "error": run_while_stopped(llm)}), flush=True)
    with open_streamed(artifact, slots, PATIENT) as llm:
        expected = tokens(llm)
        for how in FAULTS:
            report_fault(llm, how, expected)
    llm = open_streamed(artifact, slots, HASTY)
    report_fault(llm, "stall", expected)
    say("stall")
    with suppress(ExecutorError):
        tokens(llm)
    llm.close()  # while a read is stuck
    print(json.dumps({"closed": True}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
