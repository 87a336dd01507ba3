"""Where an engine comes to an end: of the context, and of memory."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import PROMPT, answer, reference_without_end, run

from nybble.errors import (
    AllocationError,
    RequestError,
    SettingError,
)
from nybble.kvcache import FileStore
from nybble.runtime.sampler import sample
from nybble.runtime.sampling_params import ResolvedSampling, SamplingParams
from nybble.runtime.sequence import Request

Make = Callable[..., Any]


class TestContextEnd:
    def test_error_refuses_what_might_come_to_it(self, make_engine: Make) -> None:
        engine = make_engine(max_model_len=20)
        fits = SamplingParams(max_tokens=11)
        engine.add(Request("a", tuple(PROMPT), fits, on_context_end="error"))
        with pytest.raises(RequestError, match="has 9 tokens, and max_tokens is 12; the context holds 20"):
            engine.add(Request("b", tuple(PROMPT), SamplingParams(max_tokens=12), on_context_end="error"))

    @pytest.mark.parametrize("n_keep", [0, 3, 9, 17])
    @pytest.mark.parametrize("budget", [2, 50])
    def test_slide_goes_on_from_the_first_and_the_last_tokens(
        self, make_engine: Make, make_executor: Make, n_keep: int, budget: int
    ) -> None:
        executor = make_executor()
        engine = make_engine(executor, max_model_len=20, max_batch_tokens=budget, eos_token_ids=[])
        params = SamplingParams(max_tokens=50, temperature=1.0, seed=1)
        request = Request("a", tuple(PROMPT), params, on_context_end="slide", n_keep=n_keep)
        sequence = engine.add(request)
        run(engine)
        context, expected = list(PROMPT), []
        for position in range(len(PROMPT), len(PROMPT) + 50):
            row = executor.reference(context)[-1]
            sampling = ResolvedSampling(temperature=1.0)
            expected.append(sample(row, sampling, seed=1, index=0, position=position))
            context.append(expected[-1])
            if len(context) == 20:
                dropped = max(1, (20 - n_keep) // 2)
                context = context[:n_keep] + context[n_keep + dropped :]
        assert list(sequence.output().token_ids) == expected
        assert sequence.finish_reason == "length"
        assert engine.pages_free == 64

    @pytest.mark.parametrize(
        ("options", "params", "error", "message"),
        [
            ({"on_context_end": "loop"}, {}, SettingError, "on_context_end is 'loop'; expected stop, error"),
            ({"on_context_end": "slide"}, {}, SettingError, "max_tokens unset"),
            (
                {"on_context_end": "slide", "n_keep": 19}, {"max_tokens": 50}, SettingError,
                "n_keep is 19; expected 0 to 18",
            ),
            ({"deadline": 0.0}, {}, SettingError, "deadline is 0.0; expected more than 0 seconds"),
        ],
    )  # fmt: skip
    def test_settings_that_make_no_sense_are_refused(
        self, make_engine: Make, options: Any, params: Any, error: type[Exception], message: str
    ) -> None:
        with pytest.raises(error, match=message):
            make_engine(max_model_len=20).add(
                Request("a", tuple(PROMPT), SamplingParams(**params), **options)
            )


class TestMemoryRunsOut:
    def test_a_step_without_memory_is_tried_again_in_smaller_ones(
        self, make_engine: Make, make_executor: Make
    ) -> None:
        executor = make_executor()
        whole, most = executor.step, 3

        def step(batch: Any) -> Any:
            if len(batch.token_ids) > most:
                raise MemoryError
            return whole(batch)

        executor.step = step
        engine = make_engine(executor, eos_token_ids=[])
        prompts = [PROMPT[i:] + PROMPT[:i] for i in range(4)]
        sequences = [
            engine.add(Request(str(i), tuple(p), SamplingParams(max_tokens=9))) for i, p in enumerate(prompts)
        ]
        run(engine)
        for sequence, prompt in zip(sequences, prompts, strict=True):
            assert list(sequence.output().token_ids) == reference_without_end(executor, prompt, 9)
        assert engine.statistics.allocation_failures
        assert engine.statistics.preemptions

    def test_where_no_step_finds_any_a_request_fails_and_says_so(
        self, make_engine: Make, make_executor: Make
    ) -> None:
        executor = make_executor()

        def step(batch: Any) -> Any:
            raise AllocationError("no memory")

        executor.step = step
        sequence = answer(make_engine(executor), PROMPT)
        assert str(sequence.error) == "no memory"
        told = answer(make_engine(executor, explain_shortage=lambda: "the numbers"), PROMPT)
        assert isinstance(told.error, AllocationError)
        assert str(told.error) == "no memory; the numbers"

    def swap_all(self, make_engine: Make, executor: Any, **settings: Any) -> Any:
        """Three requests for which there are too few pages; each gets its answer."""
        engine = make_engine(executor, max_model_len=40, eos_token_ids=[], share_prefixes=False, **settings)
        prompts = [PROMPT[i:] + PROMPT[:i] for i in range(3)]
        sequences = [
            engine.add(Request(str(i), tuple(p), SamplingParams(max_tokens=25)))
            for i, p in enumerate(prompts)
        ]
        run(engine)
        for sequence, prompt in zip(sequences, prompts, strict=True):
            assert list(sequence.output().token_ids) == reference_without_end(executor, prompt, 25)
        assert engine.statistics.preemptions
        assert engine._swapper.used == 0
        return engine

    def test_swapped_pages_are_read_back_and_not_computed_again(
        self, make_engine: Make, make_executor: Make
    ) -> None:
        executor = make_executor(10, 4, windows=(None, 5))
        executor.swap_is_cheaper = lambda tokens: True
        self.swap_all(make_engine, executor)
        assert sum(len(batch.token_ids) for batch in executor.steps) == 3 * (9 + 24)

    def test_pages_wait_in_a_file_where_computing_them_takes_longer(
        self, make_engine: Make, make_executor: Make, tmp_path: Path
    ) -> None:
        now = [0.0]
        executor = make_executor(10, 4, windows=(None, 5))
        whole = executor.step

        def step(batch: Any) -> Any:
            now[0] += len(batch.token_ids)  # a second a token
            return whole(batch)

        executor.step = step
        engine = self.swap_all(
            make_engine, executor, clock=lambda: now[0], swap_file=FileStore(tmp_path, clock=lambda: now[0])
        )
        assert engine._swapper.count == engine.statistics.preemptions
        assert sum(len(batch.token_ids) for batch in executor.steps) == 3 * (9 + 24)
        assert list(tmp_path.iterdir()) == []

    def test_pages_are_computed_again_where_that_is_faster_than_a_file(
        self, make_engine: Make, make_executor: Make, tmp_path: Path
    ) -> None:
        class Slow(FileStore):
            def seconds(self, nbytes: int) -> float:
                return 1e9

        engine = self.swap_all(make_engine, make_executor(10, 4), swap_file=Slow(tmp_path))
        assert engine._swapper.count == 0

    @pytest.mark.parametrize("call", ["pwrite", "preadv", "mkstemp"])
    def test_a_failing_swap_file_fails_no_request(
        self, make_engine: Make, make_executor: Make, tmp_path: Path, call: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        class Free(FileStore):
            def seconds(self, nbytes: int) -> float:
                return -1.0

        failures = []

        def fail(*args: Any, **kwargs: Any) -> None:
            failures.append(call)
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(tempfile if call == "mkstemp" else os, call, fail)
        self.swap_all(make_engine, make_executor(10, 4), swap_file=Free(tmp_path))
        assert failures
