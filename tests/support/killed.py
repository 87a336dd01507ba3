"""Quantizes a model in forked children that are killed, and goes on in the next, until one is done.

python killed.py MODEL OUT SEED SETTINGS

SETTINGS is JSON. Prints, as JSON, the layer that each child began with; null where it was killed before.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from nybble.quant import checkpoint
from nybble.quantization import quantize


def run(model: str, out: str, notes: Path, settings: dict[str, Any]) -> None:
    def note(stage: str, done: int, total: int) -> None:
        with open(notes, "a", encoding="utf-8") as file:
            file.write(f"{stage} {done}\n")

    checkpoint.SAVE_SECONDS = 0.0
    quantize(model, out, resume=True, threads=1, progress=note, **settings)


def layers_in(notes: Path) -> list[int]:
    """What was reported: 0 at first, then what was kept where something was, then each layer."""
    return [int(x.split()[1]) for x in notes.read_text().splitlines() if x.startswith("quantize ")]


def wait_and_kill(child: int, notes: Path, reports: int, seconds: float) -> int:
    """Kills a child so many seconds after so many reports; what it ended with, perhaps before."""
    while len(layers_in(notes)) < reports:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(model: str, out: str, seed: int, settings: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    chance, begun = random.Random(seed), []
    notes = Path(out).with_name("notes")
    while not os.path.exists(out):  # a child may be killed when all was done
        notes.write_text("")
        child = os.fork()
        if child == 0:
            status = 1
            try:
                run(model, out, notes, settings)
                status = 0
            finally:
                os._exit(status)
        code = wait_and_kill(child, notes, chance.randint(1, 5), chance.uniform(0, 0.05))
        layers = layers_in(notes)
        begun.append(layers[1] if len(layers) > 1 else None)
        assert code in (0, -signal.SIGKILL), code
    print(json.dumps(begun))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4]))
