"""Requests that are refused, fail or are aborted: each by itself, and its pages come back."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from engines import PROMPT, answer, check_pages, expected_tokens, run

from nybble.errors import (
    DeadlineExceeded,
    DoesNotFitError,
    ExecutorError,
    QueueFull,
    RequestError,
    SettingError,
)
from nybble.runtime.sampling_params import SamplingParams
from nybble.runtime.sequence import Request

Make = Callable[..., Any]


def test_a_request_that_can_never_fit_is_refused_with_the_numbers(
    make_engine: Make, make_executor: Make
) -> None:
    engine = make_engine(make_executor(4, 4), max_model_len=100)
    with pytest.raises(
        DoesNotFitError, match="29 tokens of KV cache, 8 pages; the cache has 16 tokens, 4 pages"
    ):
        engine.add(Request("a", tuple(PROMPT), SamplingParams(max_tokens=20)))
    assert not engine.has_work
    sequence = answer(engine, PROMPT, ignore_eos=True)
    assert sequence.num_output == 7  # without max_tokens it runs to what there is
    assert sequence.finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "params", "error", "message"),
    [
        ([], {}, RequestError, "the prompt is empty"),
        ([1] * 200, {}, RequestError, "200 tokens; the context holds 200, the answer included"),
        ([64], {}, RequestError, "token 64; the model has 64"),
        ([1], {"logprobs": 65}, SettingError, "logprobs is 65"),
        ([1], {"stop_token_ids": [2, 64]}, SettingError, "stop_token_ids holds 64; the model has 64"),
    ],
)
def test_requests_that_cannot_run_are_refused_when_added(
    make_engine: Make, prompt: list[int], params: dict[str, Any], error: type[Exception], message: str
) -> None:
    engine = make_engine()
    with pytest.raises(error, match=message):
        engine.add(Request("a", tuple(prompt), SamplingParams(**params)))
    assert not engine.has_work


def test_a_prompt_one_short_of_the_context_gets_one_token(make_engine: Make) -> None:
    sequence = answer(make_engine(), [1] * 199, max_tokens=5)
    assert sequence.num_output == 1
    assert sequence.finish_reason in ("length", "stop")


def test_an_executors_error_fails_its_step_and_no_more(make_engine: Make, make_executor: Make) -> None:
    executor = make_executor()
    engine = make_engine(executor)
    executor.fail_at = {2: RuntimeError("out of\nluck")}
    first = engine.add(Request("a", tuple(PROMPT), SamplingParams(max_tokens=9)))
    engine.step()
    engine.step()
    assert isinstance(first.error, ExecutorError)
    assert str(first.error) == "the executor failed in a step: RuntimeError: out of luck"
    assert engine.pages_free == 64
    second = answer(engine, PROMPT, max_tokens=9)
    assert list(second.output().token_ids) == expected_tokens(executor, PROMPT, 9)


def test_an_interrupt_leaves_an_engine_that_goes_on(make_engine: Make, make_executor: Make) -> None:
    executor = make_executor()
    executor.decode_steps = 2
    engine = make_engine(executor)
    sequence = engine.add(Request("a", tuple(PROMPT), SamplingParams(max_tokens=20)))
    for number in (1, 4, 5):
        executor.fail_at[number] = KeyboardInterrupt()
    interrupts = 0
    while engine.has_work:
        try:
            engine.step()
        except KeyboardInterrupt:
            interrupts += 1
        check_pages(engine, [] if sequence.finished else [sequence], 64)
        # An interrupted step's are used again.
        assert 64 - engine.pages_free <= -(-(len(sequence.tokens) + 1) // 4)
    assert interrupts == 3
    assert list(sequence.output().token_ids) == expected_tokens(executor, PROMPT, 20)


def test_logits_that_are_not_numbers_fail_their_request_only(make_engine: Make, make_executor: Make) -> None:
    executor = make_executor()
    whole = executor.step

    def step(batch: Any) -> Any:
        logits = whole(batch)
        if len(logits) == 2:
            logits[0] = np.nan
        return logits

    executor.step = step
    engine = make_engine(executor)
    a = engine.add(Request("a", tuple(PROMPT[:4]), SamplingParams(max_tokens=9)))
    b = engine.add(Request("b", tuple(PROMPT[4:]), SamplingParams(max_tokens=9)))
    run(engine)
    assert isinstance(a.error, ExecutorError)
    assert list(b.output().token_ids) == expected_tokens(executor, PROMPT[4:], 9)


def test_logits_of_a_wrong_shape_are_an_error(make_engine: Make, make_executor: Make) -> None:
    executor = make_executor()
    executor.step = lambda batch: np.zeros((1, 7), np.float32)
    sequence = answer(make_engine(executor), PROMPT)
    assert "shape (1, 7); expected (1, 64)" in str(sequence.error)


def test_abort_frees_the_pages_and_keeps_what_was_said(make_engine: Make) -> None:
    engine = make_engine()
    sequence = engine.add(Request("a", tuple(PROMPT), SamplingParams(ignore_eos=True)))
    for _ in range(4):
        engine.step()
    engine.abort("a")
    engine.abort("a")
    engine.abort("never seen")
    assert engine.pages_free == 64
    assert not engine.has_work
    assert sequence.output().finish_reason == "abort"
    assert len(sequence.output().token_ids) == 1 + 3 * 8


def test_an_abort_inside_a_step_takes_effect_at_its_end(make_engine: Make, make_executor: Make) -> None:
    executor = make_executor()
    executor.decode_steps = 0
    whole, engine = executor.step, make_engine(executor)

    def step(batch: Any) -> Any:
        if len(executor.steps) == 2:
            engine.abort("a")
        return whole(batch)

    executor.step = step
    a = engine.add(Request("a", tuple(PROMPT[:4]), SamplingParams(ignore_eos=True)))
    b = engine.add(Request("b", tuple(PROMPT[4:]), SamplingParams(max_tokens=9)))
    run(engine)
    assert a.finish_reason == "abort"
    assert a.num_output == 3
    assert list(b.output().token_ids) == expected_tokens(executor, PROMPT[4:], 9)
    assert engine.pages_free == 64


def test_a_request_past_its_deadline_fails_and_is_named_by_the_step(make_engine: Make) -> None:
    now = [0.0]
    engine = make_engine(clock=lambda: now[0], max_sequences=1, eos_token_ids=[])
    running = engine.add(Request("a", tuple(PROMPT), SamplingParams(max_tokens=50), deadline=3))
    waiting = engine.add(Request("b", tuple(PROMPT), SamplingParams(max_tokens=50), deadline=2))
    engine.step()
    now[0] = 2.5
    assert engine.step() == [waiting, running]
    assert isinstance(waiting.error, DeadlineExceeded)
    assert "while it was waiting" in str(waiting.error)
    now[0] = 3.0
    assert engine.step() == [running]
    assert "0.000 s ago while it was running" in str(running.error)
    assert not engine.has_work
    assert engine.pages_free == 64


def test_a_full_queue_refuses_a_request_and_keeps_nothing_of_it(make_engine: Make) -> None:
    engine = make_engine(max_waiting=2)
    for name in "ab":
        engine.add(Request(name, tuple(PROMPT)))
    with pytest.raises(QueueFull, match="2 requests are waiting; max_waiting is 2"):
        engine.add(Request("c", tuple(PROMPT)))
    assert engine.statistics.requests_added == 2
    engine.step()
    engine.add(Request("c", tuple(PROMPT)))
