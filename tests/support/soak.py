"""Random load on one model, from threads and from tasks, until the time is over.

    python soak.py MODEL SECONDS SEED

Every request is one of a fixed list whose answers were taken one by one before, with nothing else running.
Prints what happened as JSON; the first thing that is wrong ends it with an exception.
"""

import asyncio
import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nybble import LLM, AsyncLLM, SamplingParams

THREADS, TASKS = 4, 8
WARM_UP = 0.3  # of the time; then everything has been touched once
SYSTEM = "You answer briefly, in plain words, and never say what you do not know. " * 2
WORDS = ("name", "value", "class", "object", "list", "number", "text", "file", "module", "error", "string")


@dataclass(frozen=True)
class Case:
    """A request, and what it gives alone."""

    asked: Any  # a text, token ids or messages
    params: SamplingParams
    token_ids: tuple[int, ...]
    text: str

    @property
    def is_chat(self) -> bool:
        return isinstance(self.asked, list) and isinstance(self.asked[0], dict)


def make_cases(llm: LLM, rng: random.Random, count: int) -> list[Case]:
    cases = []
    for number in range(count):
        words = " ".join(rng.choices(WORDS, k=rng.randint(1, 40)))
        params = SamplingParams(
            max_tokens=rng.choice([1, 3, 10, 40]),
            temperature=rng.choice([0.0, 0.8, 1.3]),
            top_p=rng.choice([1.0, 0.9]),
            repetition_penalty=rng.choice([1.0, 1.2]),
            seed=number,
            ignore_eos=rng.random() < 0.7,
        )
        asked: Any = words
        if number % 3 == 1:
            asked = llm.encode(words)
        if number % 3 == 2:
            asked = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": words}]
        answer = llm.chat(asked, params) if number % 3 == 2 else llm.generate(asked, params)
        cases.append(Case(asked, params, answer.token_ids, answer.text))
    return cases


class Soak:
    def __init__(self, llm: LLM, cases: list[Case], seconds: float) -> None:
        self.llm, self.model = llm, AsyncLLM(llm)
        self.cases = cases
        self.begin = time.monotonic()
        self.end = self.begin + seconds
        self.warm = self.begin + seconds * WARM_UP
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []
        self.resident: list[int] = []

    @property
    def goes_on(self) -> bool:
        return time.monotonic() < self.end and not self.errors

    def check(
        self, kind: str, case: Case, token_ids: tuple[int, ...], text: str, *, whole: bool = True
    ) -> None:
        expected = case.token_ids if whole else case.token_ids[: len(token_ids)]
        if token_ids != expected or not (text == case.text if whole else case.text.startswith(text)):
            self.errors.append(f"{kind}: {case} gave {token_ids} {text!r}")
        self.counts[kind] += 1
        self.counts["tokens"] += len(token_ids)

    def thread(self, rng: random.Random) -> None:
        """A client that waits for its answers."""
        while self.goes_on:
            case, kind = rng.choice(self.cases), rng.choice(["whole", "list", "stream", "dropped", "closed"])
            if kind == "whole":
                ask = self.llm.chat if case.is_chat else self.llm.generate
                output = ask(case.asked, case.params)
                self.check(kind, case, output.token_ids, output.text)
            elif kind == "list":
                some = [c for c in rng.choices(self.cases, k=6) if not c.is_chat]
                outputs = self.llm.generate([c.asked for c in some], [c.params for c in some])
                for case, output in zip(some, outputs, strict=True):
                    self.check(kind, case, output.token_ids, output.text)
            else:
                self.read(kind, case, rng)
            if rng.random() < 0.2:
                time.sleep(rng.random() * 0.02)

    def read(self, kind: str, case: Case, rng: random.Random) -> None:
        pieces = []
        wanted = len(case.token_ids) if kind == "stream" else rng.randint(0, len(case.token_ids))
        stream = self.llm.stream(case.asked, case.params)
        for _ in range(wanted):
            pieces.append(next(stream))
        if kind == "stream" and next(stream, None) is not None:
            self.errors.append(f"stream: {case} has more tokens")
        if kind == "closed":
            stream.close()
        token_ids = tuple(piece.token_id for piece in pieces)
        self.check(kind, case, token_ids, "".join(p.text for p in pieces), whole=kind == "stream")

    async def task(self, rng: random.Random) -> None:
        """A client of an event loop."""
        while self.goes_on:
            case, kind = rng.choice(self.cases), rng.choice(["awaited", "async stream", "left", "cancelled"])
            if kind == "awaited":
                ask = self.model.chat if case.is_chat else self.model.generate
                output = await ask(case.asked, case.params)
                self.check(kind, case, output.token_ids, output.text)
            elif kind == "cancelled":
                running = asyncio.create_task(self.drain(case))
                await asyncio.sleep(rng.random() * 0.01)
                running.cancel()
                await asyncio.wait([running])
                self.counts[kind] += running.cancelled()
            else:
                limit = None if kind == "async stream" else rng.randint(1, len(case.token_ids))
                pieces = await self.drain(case, limit)
                token_ids = tuple(piece.token_id for piece in pieces)
                self.check(kind, case, token_ids, "".join(p.text for p in pieces), whole=limit is None)
            await asyncio.sleep(rng.random() * 0.01)

    async def drain(self, case: Case, limit: int | None = None) -> list[Any]:
        pieces = []
        async for piece in self.model.stream(case.asked, case.params):
            pieces.append(piece)
            if len(pieces) == limit:
                break
        return pieces

    def run(self, seed: int) -> None:
        def guarded(function: Callable[[], Any]) -> None:
            try:
                function()
            except BaseException as error:
                self.errors.append(repr(error))
                raise

        async def tasks() -> None:
            await asyncio.gather(*(self.task(random.Random(seed + 100 + n)) for n in range(TASKS)))

        calls: list[Callable[[], Any]] = [
            lambda n=n: self.thread(random.Random(seed + n))
            for n in range(THREADS)  # type: ignore[misc]
        ]
        calls.append(lambda: asyncio.run(tasks()))
        threads = [threading.Thread(target=guarded, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.25)
            if time.monotonic() > self.warm:
                self.resident.append(resident_bytes())
        for thread in threads:
            thread.join()


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def main() -> None:
    path, seconds, seed = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    llm = LLM(path, executor="cpu", threads=2, max_model_len=512, max_sequences=6, max_batch_tokens=64,
              memory_budget="300MB", cache=False)  # fmt: skip
    free = llm._loop.call(lambda engine: engine.pages_free)
    soak = Soak(llm, make_cases(llm, random.Random(seed), 60), seconds)
    soak.run(seed)
    after = llm._loop.call(lambda engine: (engine.has_work, engine.pages_free))
    llm.close()
    report = {
        "errors": soak.errors,
        "counts": dict(soak.counts),
        "resident": soak.resident,
        "pages_lost": free - after[1],
        "has_work": after[0],
        "threads_left": [t.name for t in threading.enumerate() if t is not threading.main_thread()],
        "seconds": time.monotonic() - soak.begin,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
