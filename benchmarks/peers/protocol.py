"""What a peer's worker and `benchmarks/peers.py` say to each other: one JSON object a line, a reply for each.

    {"do": "load", "model": ..., "threads": 2, "context": 4224, "sequences": 8} ->  {}
    {"do": "run", "prompts": [[token id, ...], ...], "new_tokens": 129} ->  {"first": s, "total": s}
    {"do": "memory"} ->  {"peak_bytes": n}
    {"do": "about"}    ->  {"version": ..., settings}
    {"do": "prepare", "gguf": ..., "folder": ..., "work": ...} ->  {"models": {label: path}}

For `benchmarks/engine.py`, what `traffic.py` describes; the rest is a method of the runtime.

Seconds are from the start of the work, to when every prompt has its first token and to the end. A request
that fails is answered with {"error": ...}; the end of the input ends the worker. This runs in the peer's
own Python, so it uses nothing but the standard library.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Protocol

from traffic import traffic


class Runtime(Protocol):
    """A loaded model. Made with the model's path, threads, tokens of context and sequences at once."""

    def generate(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, float, list[list[int]]]:
        """Decodes exactly `new_tokens` greedily for every prompt, together. Returns `time.perf_counter()` at
        the start and when every prompt had its first token, and the tokens."""
        ...

    def about(self) -> dict[str, Any]:
        """Version and settings that the figures depend on."""
        ...


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def run(runtime: Runtime, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    start, first, tokens = runtime.generate(prompts, new_tokens)
    total = time.perf_counter() - start
    if [len(answer) for answer in tokens] != [new_tokens] * len(prompts):
        raise RuntimeError(f"{[len(answer) for answer in tokens]} tokens; expected {new_tokens} each")
    return {"first": first - start, "total": total}


def serve(load: Any, prepare: Any = None) -> None:
    """Answers until the input ends. `load(model, threads, context, sequences)` makes a `Runtime`;
    `prepare(gguf, folder, work)` makes the peer's own form of the model, and returns paths by label."""
    # Libraries print; the replies keep the real standard output for themselves.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    runtime: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        do = request.pop("do")
        reply: dict[str, Any] = {}
        try:
            if do == "prepare":
                paths = prepare(Path(request["gguf"]), Path(request["folder"]), Path(request["work"]))
                reply = {"models": {label: str(path) for label, path in paths.items()}}
            elif do == "load":
                if hasattr(runtime, "close"):
                    runtime.close()
                runtime = load(**request)
            elif do == "run":
                reply = run(runtime, **request)
            elif do == "memory":
                reply = {"peak_bytes": peak_bytes()}
            elif do == "traffic":
                reply = traffic(runtime, **request)
            else:
                reply = getattr(runtime, do)(**request)
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
