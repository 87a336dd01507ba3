"""What `nybble tune` runs to compare settings: requests on an `LLM` that is opened with them."""

import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Literal, get_args

from .devices import KvDtype, Speculation, peak_resident_bytes, reset_peak_resident
from .llm import LLM
from .records import dataclass
from .runtime.sampling_params import SamplingParams

Goal = Literal["latency", "throughput", "memory"]
GOALS: tuple[Goal, ...] = get_args(Goal)
TOGETHER = 8  # requests at once, for throughput


@dataclass(frozen=True)
class Settings:
    """What is searched. None of it but `kv_dtype` changes a token."""

    threads: int
    max_batch_tokens: int
    kv_dtype: KvDtype
    speculation: Speculation


@dataclass(frozen=True)
class Measurement:
    """One run of a workload."""

    seconds: float  # from the first request until the last has ended
    first_token: float  # seconds, the mean of the requests
    peak_bytes: int | None  # resident, loading included; None where it can't be read


@dataclass(frozen=True)
class Workload:
    """Requests of `prompt` tokens with answers of `answer` tokens: for throughput eight at once, else two,
    one after the other. Half of them go on with a text, and half repeat theirs, where guessing ahead pays."""

    goal: Goal
    prompt: int
    answer: int

    @property
    def requests(self) -> int:
        return TOGETHER if self.goal == "throughput" else 2

    def run(self, path: str | Path, settings: Settings) -> Measurement:
        """Opens the model, runs the requests and closes it. Raises what `LLM` does."""
        resets = reset_peak_resident()
        with LLM(path, **vars(settings), tuned=False) as llm:
            prompts = self._prompts(llm)
            # Maps the weights, and wakes the threads.
            llm.generate(prompts[0][:4], SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
            params = SamplingParams(max_tokens=self.answer, temperature=0, ignore_eos=True)
            begin = time.perf_counter()
            if self.goal == "throughput":
                outputs = llm.generate(prompts, params)
            else:
                outputs = [llm.generate(prompt, params) for prompt in prompts]
            seconds = time.perf_counter() - begin
        first = [output.timings.time_to_first_token or 0.0 for output in outputs]
        return Measurement(seconds, sum(first) / len(first), peak_resident_bytes() if resets else None)

    def _prompts(self, llm: LLM) -> list[list[int]]:
        """Token ids of English prose, of another place in it for each request."""
        ids: list[int] = []
        for name in sorted(topics):
            if len(ids) >= self.requests * self.prompt:
                break
            ids += llm.encode(topics[name], add_special_tokens=False)
        prompts = []
        for number in range(self.requests):
            prompt = ids[number * self.prompt : (number + 1) * self.prompt]
            if number % 2:  # the last fifth says again how it began
                again = len(prompt) // 5
                prompt = prompt[: len(prompt) - again] + prompt[:again]
            prompts.append(prompt)
        return prompts
