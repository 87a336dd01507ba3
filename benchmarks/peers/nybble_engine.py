"""Nybble's engine through `AsyncLLM`, a task a request, with token ids as prompts."""

import asyncio
import time
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from protocol import serve
from traffic import Arrival

import nybble
from nybble import LLM, AsyncLLM, SamplingParams

POLL = 0.02  # seconds between two looks at the pages in use


class NybbleEngine:
    def __init__(self, model: str, threads: int, context: int, sequences: int, **settings: Any) -> None:
        self._llm = LLM(
            model,
            executor="cpu",
            threads=threads,
            max_model_len=context,
            max_sequences=sequences,
            **settings,
            tuned=False,
        )
        self._settings = settings

    def traffic(self, arrivals: list[Arrival], until: int | None) -> list[list[float]]:
        return asyncio.run(self._traffic(arrivals, until))

    async def _traffic(self, arrivals: list[Arrival], until: int | None) -> list[list[float]]:
        times: list[list[float]] = [[] for _ in arrivals]
        llm, start, done = AsyncLLM(self._llm), time.perf_counter(), asyncio.Event()

        async def ask(index: int, arrival: Arrival) -> None:
            await asyncio.sleep(arrival.at - (time.perf_counter() - start))
            params = SamplingParams(temperature=0, max_tokens=arrival.new_tokens, ignore_eos=True)
            async for _ in llm.stream(arrival.prompt, params):
                times[index].append(time.perf_counter() - start)
                if index == until:
                    done.set()

        tasks = [asyncio.create_task(ask(i, arrival)) for i, arrival in enumerate(arrivals)]
        if until is not None:
            await done.wait()
            for task in tasks:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=until is not None)
        return times

    def statistics(self) -> dict[str, Any]:
        """The engine's, between two steps."""
        return asdict(self._llm._loop.call(lambda engine: engine.statistics))

    def peak_pages(self, arrivals: list[list[Any]]) -> dict[str, Any]:
        """The most pages that the requests of a traffic hold at once, of those that are full at its end."""
        return asyncio.run(self._peak_pages([Arrival(*arrival) for arrival in arrivals]))

    async def _peak_pages(self, arrivals: list[Arrival]) -> dict[str, Any]:
        running = asyncio.create_task(self._traffic(arrivals, None))
        peak = 0
        while not running.done():
            peak = max(peak, (await asyncio.to_thread(self.statistics))["pages_used"])
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(running), POLL)
        await running
        return {"pages": peak}

    def close(self) -> None:
        self._llm.close()

    def about(self) -> dict[str, Any]:
        settings = ", ".join(["CpuExecutor", *(f"{name} {value}" for name, value in self._settings.items())])
        return {"version": f"nybble {nybble.__version__}", "settings": settings}


if __name__ == "__main__":
    serve(NybbleEngine)
