"""What `LLM` lets a caller say about scheduling and the cache, and what it tells about them."""

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from gate import gated

from nybble import LLM, AsyncLLM, SamplingParams
from nybble.errors import (
    DeadlineExceeded,
    ModelFormatError,
    NybbleError,
    OutputError,
    QueueFull,
    RequestError,
    SettingError,
)
from nybble.runtime.statistics import StepStatistics

PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)
PREFIX = "An iterator is an object with a method that returns the next item of a container. " * 3
HEAD = [{"role": "system", "content": PREFIX}]


@pytest.fixture
def llm(tiny_artifact: Path) -> Iterator[LLM]:
    with LLM(tiny_artifact, executor="cpu", threads=1) as llm:
        yield llm


def test_statistics_count_what_was_done(tiny_artifact: Path) -> None:
    steps: list[StepStatistics] = []
    with LLM(tiny_artifact, executor="cpu", threads=1, on_step=steps.append, speculation="off") as llm:
        llm.generate([PREFIX + "One", "Two"], PARAMS)
        first = llm.statistics()
        assert (first.requests_added, first.requests_finished, first.running) == (2, 2, 0)
        assert first.decode_tokens == 12
        assert first.steps == sum(step.steps for step in steps) > len(steps) > 0
        assert first.hit_rate == 0
        assert llm.generate(PREFIX + "Three", PARAMS).timings.cached_tokens > 16
        assert llm.statistics().hit_rate > 0.3
        assert asyncio.run(AsyncLLM(llm).statistics()) == llm.statistics()
    assert llm.statistics().requests_finished == 3


def test_prefixes_need_not_be_shared(tiny_artifact: Path) -> None:
    with LLM(tiny_artifact, executor="cpu", threads=1, share_prefixes=False) as llm:
        for _ in range(2):
            assert llm.generate(PREFIX, PARAMS).timings.cached_tokens == 0
        with pytest.raises(RequestError):
            llm.save_prefix("nowhere", PREFIX)
    with LLM(tiny_artifact, executor="cpu", threads=1, min_shared_tokens=4000) as llm:
        for _ in range(2):
            assert llm.generate(PREFIX, PARAMS).timings.cached_tokens == 0


def test_a_higher_priority_comes_first_and_a_full_queue_refuses(tiny_artifact: Path) -> None:
    ended: list[str | None] = []
    with (
        LLM(tiny_artifact, executor="cpu", threads=1, max_sequences=1, max_waiting=2) as llm,
        gated(llm._loaded.executor) as gate,
        ThreadPoolExecutor(4) as pool,
    ):
        llm._loop._engine._on_end = lambda sequence: ended.append(sequence.request.prompt)
        running = [pool.submit(llm.generate, "running", PARAMS)]
        gate.let(0)
        for waiting, (name, priority) in enumerate((("low", 0), ("high", 3)), 1):
            running.append(pool.submit(llm.generate, name, PARAMS, priority=priority))
            while llm._loop._messages.qsize() < waiting:
                time.sleep(0.001)
        gate.let(1)
        refused = pool.submit(llm.generate, "more", PARAMS, priority=9)
        while not llm._loop._messages.qsize():
            time.sleep(0.001)
        gate.open()
        with pytest.raises(QueueFull):
            refused.result()
        for each in running:
            each.result()
    assert ended == ["running", "high", "low"] or ended == ["high", "running", "low"]


def test_a_deadline_that_passes_fails_its_request_alone(llm: LLM) -> None:
    endless = SamplingParams(ignore_eos=True)
    llm.generate("anything", PARAMS)  # the engine is there
    scheduler = llm._loop._engine._scheduler
    clock = scheduler._clock
    with gated(llm._loaded.executor) as gate, ThreadPoolExecutor(2) as pool:
        late = pool.submit(llm.generate, "late", endless, deadline=600.0)
        gate.let(1)
        other = pool.submit(llm.generate, "other", PARAMS)
        scheduler._clock = lambda: clock() + 601
        gate.open()
        with pytest.raises(DeadlineExceeded):
            late.result()
        assert len(other.result().token_ids) == 6
    scheduler._clock = clock


def test_the_contexts_end(tiny_artifact: Path) -> None:
    with LLM(tiny_artifact, executor="cpu", threads=1, max_model_len=64) as llm:
        prompt, long = [5] * 30, SamplingParams(max_tokens=80, ignore_eos=True)
        assert len(llm.generate(prompt, long).token_ids) == 34
        with pytest.raises(RequestError, match="the context holds 64"):
            llm.generate(prompt, long, on_context_end="error")
        slid = llm.generate(prompt, long, on_context_end="slide", n_keep=4)
        assert len(slid.token_ids) == 80
        with llm.stream(prompt, long, on_context_end="slide", n_keep=4) as stream:
            assert tuple(piece.token_id for piece in stream) == slid.token_ids
        assert asyncio.run(
            AsyncLLM(llm).generate(prompt, long, on_context_end="slide", n_keep=4)
        ).outputs == slid.outputs  # fmt: skip


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"priority": "high"}, SettingError, "priority is 'high'; expected a whole number"),
        ({"deadline": "soon"}, SettingError, "deadline is 'soon'; expected seconds"),
        ({"deadline": -1}, SettingError, "deadline is -1"),
        ({"on_context_end": "wrap"}, SettingError, "on_context_end is 'wrap'"),
        ({"n_keep": 1.5}, SettingError, "n_keep is 1.5; expected a whole number"),
        ({"colour": "red"}, TypeError, "colour"),
    ],
)
def test_what_does_not_fit_is_named(
    llm: LLM, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        llm.generate("One", PARAMS, **options)
    if error is SettingError:
        with pytest.raises(error, match=message):
            llm.chat(HEAD, PARAMS, **options)
        with pytest.raises(error, match=message):
            llm.stream("One", PARAMS, **options)


@pytest.mark.parametrize(
    "name", ["max_waiting", "max_waiting_tokens", "min_shared_tokens", "target_token_ms"]
)
def test_settings_of_the_engine_are_checked(tiny_artifact: Path, name: str) -> None:
    with pytest.raises(SettingError, match=f"{name} is 0"):
        LLM(tiny_artifact, executor="cpu", **{name: 0})  # type: ignore[arg-type]


def test_a_stream_of_several_answers(llm: LLM) -> None:
    params = SamplingParams(n=3, max_tokens=8, temperature=1.0, seed=4, ignore_eos=True)
    whole = llm.generate("One, two", params)
    assert len(whole.outputs) == 3
    with llm.stream("One, two", params) as stream:
        pieces = list(stream)
    assert stream.output.outputs == whole.outputs
    for index, answer in enumerate(whole.outputs):
        mine = [piece for piece in pieces if piece.index == index]
        assert tuple(piece.token_id for piece in mine) == answer.token_ids
        assert "".join(piece.text for piece in mine) == answer.text
    with llm.stream("One, two", params) as stream:
        read = [next(stream) for _ in range(7)]
    for index, answer in enumerate(stream.output.outputs):
        assert answer.token_ids == tuple(piece.token_id for piece in read if piece.index == index)
    with pytest.raises(SettingError, match="cannot be streamed"):
        llm.stream("One, two", SamplingParams(best_of=3, temperature=1.0))


@pytest.mark.parametrize("kind", ["text", "ids", "messages"])
def test_a_saved_prefix_is_found_after_a_restart(
    tiny_artifact: Path, llm: LLM, tmp_path: Path, kind: str
) -> None:
    question = [*HEAD, {"role": "user", "content": "Why?"}]
    prefix: Any = {"text": PREFIX, "ids": llm.encode(PREFIX), "messages": HEAD}[kind]

    def answer(model: LLM) -> Any:
        return model.chat(question, PARAMS) if kind == "messages" else model.generate(PREFIX + "Why?", PARAMS)

    expected = answer(llm).outputs
    saved = llm.save_prefix(tmp_path / "prefix", prefix)
    assert saved >= 32
    assert saved % 16 == 0
    with LLM(tiny_artifact, executor="cpu", threads=1) as other:
        assert other.load_prefix(tmp_path / "prefix") == saved
        output = answer(other)
        assert output.timings.cached_tokens >= saved
        assert output.outputs == expected

        async def use() -> tuple[int, int]:
            model = AsyncLLM(other)
            return await model.save_prefix(tmp_path / "again", prefix), await model.load_prefix(
                tmp_path / "again"
            )

        assert asyncio.run(use()) == (saved, saved)
        with pytest.raises(OutputError):
            other.save_prefix(tmp_path / "no folder" / "prefix", prefix)
    for call in (lambda: other.load_prefix(tmp_path / "prefix"), lambda: other.save_prefix(tmp_path, prefix)):
        with pytest.raises(RequestError, match="closed"):
            call()


def test_a_prefix_of_another_cache_or_a_damaged_one_is_refused(
    tiny_artifact: Path, llm: LLM, tmp_path: Path
) -> None:
    path = tmp_path / "prefix"
    llm.save_prefix(path, PREFIX)
    with LLM(tiny_artifact, executor="cpu", threads=1, kv_dtype="int8") as other:
        with pytest.raises(NybbleError, match="prefix"):
            other.load_prefix(path)
        assert len(other.generate("One", PARAMS).token_ids) == 6
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with LLM(tiny_artifact, executor="cpu", threads=1) as other:
        with pytest.raises(ModelFormatError, match="prefix"):
            other.load_prefix(path)
        with pytest.raises(NybbleError):
            other.load_prefix(tmp_path / "nothing")
        assert other.generate(PREFIX, PARAMS).outputs == llm.generate(PREFIX, PARAMS).outputs
    with pytest.raises(RequestError, match="page"):
        llm.save_prefix(path, "One")
