"""`AsyncLLM`: many tasks on one model, and what becomes of those that go away."""

import asyncio
import gc
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from gate import gated

from nybble import LLM, AsyncLLM, SamplingParams
from nybble.errors import ModelFormatError, RequestError, SettingError

PROMPT = "The class statement defines"
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a name?"}]
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.9, seed=3, logprobs=1)
ENDLESS = SamplingParams(ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_artifact: Path) -> Iterator[LLM]:
    with LLM(tiny_artifact, executor="cpu", threads=1) as llm:
        yield llm


@pytest.fixture(autouse=True)
def all_pages_come_back(llm: LLM) -> Iterator[None]:
    free = llm._loop.call(lambda engine: engine.pages_free)
    yield
    assert llm._loop.call(lambda engine: (engine.has_work, engine.pages_free)) == (False, free)


def run(llm: LLM, use: Callable[[AsyncLLM], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        return await use(AsyncLLM(llm))

    return asyncio.run(main())


def test_every_method_gives_what_llm_gives(llm: LLM) -> None:
    async def use(model: AsyncLLM) -> None:
        one = await model.generate(PROMPT, PARAMS)
        assert one.outputs == llm.generate(PROMPT, PARAMS).outputs
        several = await model.generate([PROMPT, "def"], [PARAMS, ENDLESS])
        assert [o.outputs for o in several] == [
            o.outputs for o in llm.generate([PROMPT, "def"], [PARAMS, ENDLESS])
        ]
        assert (await model.chat(CHAT, PARAMS)).outputs == llm.chat(CHAT, PARAMS).outputs
        assert await model.score(PROMPT) == llm.score(PROMPT)
        stream = model.stream(CHAT, PARAMS)
        pieces = [piece async for piece in stream]
        assert pieces == list(llm.stream(CHAT, PARAMS))
        assert stream.output.outputs == llm.chat(CHAT, PARAMS).outputs
        assert model.max_model_len == llm.max_model_len
        assert model.tokenizer is llm.tokenizer

    run(llm, use)


def test_many_tasks_and_threads_at_once_get_what_each_gets_alone(llm: LLM) -> None:
    prompts = [f"{PROMPT} {number}" for number in range(12)]
    alone = [llm.generate(prompt, PARAMS).outputs for prompt in prompts]

    async def read(model: AsyncLLM, prompt: str) -> Any:
        stream = model.stream(prompt, PARAMS)
        text = "".join([piece.text async for piece in stream])
        assert text == stream.output.text
        return stream.output.outputs

    async def ask(model: AsyncLLM, prompt: str) -> Any:
        return (await model.generate(prompt, PARAMS)).outputs

    async def use(model: AsyncLLM) -> Any:
        return await asyncio.gather(*(f(model, prompt) for prompt in prompts for f in (read, ask)))

    with ThreadPoolExecutor(4) as pool:
        loops = [pool.submit(run, llm, use) for _ in range(2)]
        threads = [pool.submit(llm.generate, prompts, PARAMS) for _ in range(2)]
        for answers in loops:
            assert answers.result() == [outputs for outputs in alone for _ in range(2)]
        for outputs in threads:
            assert [output.outputs for output in outputs.result()] == alone


def test_errors_reach_the_task(llm: LLM) -> None:
    async def use(model: AsyncLLM) -> None:
        for call in (
            lambda: model.generate(["fine", ""]),
            lambda: model.generate(["fine", [1] * 600]),
            lambda: model.score([1] * 600),
            lambda: model.chat([]),
            lambda: anext(model.stream([1] * 600)),
            lambda: anext(model.stream([])),
        ):
            with pytest.raises(RequestError):
                await call()
        with pytest.raises(SettingError, match="expected SamplingParams"):
            await model.generate(PROMPT, {"temperature": 1})  # type: ignore[call-overload]
        stream = model.stream([1] * 600)
        with pytest.raises(RequestError, match="600 tokens"):
            await anext(stream)
        assert [piece async for piece in stream] == []
        with pytest.raises(RequestError, match="no output yet"):
            _ = stream.output

    run(llm, use)


@pytest.mark.parametrize("how", ["generate", "several", "stream", "chat"])
def test_a_cancelled_task_ends_within_the_step(llm: LLM, how: str) -> None:
    async def use(model: AsyncLLM) -> None:
        async def read() -> None:
            async for _ in model.stream(PROMPT, ENDLESS):
                pass

        calls: dict[str, Callable[[], Any]] = {
            "generate": lambda: model.generate(PROMPT, ENDLESS),
            "several": lambda: model.generate([PROMPT] * 3, ENDLESS),
            "stream": read,
            "chat": lambda: model.chat(CHAT, ENDLESS),
        }
        with gated(llm._loaded.executor) as gate:
            task = asyncio.create_task(calls[how]())
            await asyncio.to_thread(gate.let, 3)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            gate.open()
            free = llm._loop.call(lambda engine: engine.pages_free)
            assert gate.steps == 4
        assert free == llm._loop.call(lambda engine: engine.pages_free)

    run(llm, use)


def test_a_stream_that_is_left_ends_within_the_step(llm: LLM) -> None:
    async def use(model: AsyncLLM) -> None:
        with gated(llm._loaded.executor) as gate:
            reading = asyncio.create_task(read_one(model))
            await asyncio.to_thread(gate.pass_one)
            await reading
            gc.collect()
            gate.open()
            assert not llm._loop.call(lambda engine: engine.has_work)
            assert gate.steps <= 2

    async def read_one(model: AsyncLLM) -> None:
        async for _ in model.stream(PROMPT, ENDLESS):
            break

    run(llm, use)


def test_closing_a_stream_waits_for_its_end(llm: LLM) -> None:
    async def use(model: AsyncLLM) -> None:
        async with model.stream(PROMPT, ENDLESS) as stream:
            pieces = [await anext(stream) for _ in range(3)]
            assert stream.output.finish_reason is None
            assert stream.output.token_ids == tuple(piece.token_id for piece in pieces)
        assert not llm._loop.call(lambda engine: engine.has_work)
        assert stream.output.finish_reason == "abort"
        assert stream.output.text == "".join(piece.text for piece in pieces)
        assert [piece async for piece in stream] == []
        unread = model.stream(PROMPT, ENDLESS)
        await unread.aclose()
        assert [piece async for piece in unread] == []

    run(llm, use)


def test_several_tasks_may_read_one_stream(llm: LLM) -> None:
    async def use(model: AsyncLLM) -> None:
        stream = model.stream(PROMPT, PARAMS)

        async def read() -> list[int]:
            return [piece.token_id async for piece in stream]

        parts = await asyncio.gather(read(), read(), read())
        assert sorted(token for part in parts for token in part) == sorted(stream.output.token_ids)

    run(llm, use)


def test_an_event_loop_that_is_gone_leaves_nothing_running(llm: LLM) -> None:
    kept: list[Any] = []

    async def use(model: AsyncLLM) -> None:
        stream = model.stream(PROMPT, ENDLESS)
        await anext(stream)
        kept.append(stream)  # neither dropped nor closed, and no task waits for it

    with gated(llm._loaded.executor) as gate:
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(run, llm, use)
            gate.let(1)
            running.result()
        gate.open()
        llm._loop.call(lambda engine: None)  # the step that finds nobody there
        assert not llm._loop.call(lambda engine: engine.has_work)
        assert gate.steps <= 3


def test_loads_in_a_thread_once_and_closes(tiny_artifact: Path) -> None:
    async def main() -> None:
        before = set(threading.enumerate())
        llm = AsyncLLM(tiny_artifact, executor="cpu", threads=1)
        with pytest.raises(RequestError, match="not loaded"):
            _ = llm.max_model_len
        first, second = await asyncio.gather(llm.generate(PROMPT, PARAMS), llm.generate(PROMPT, PARAMS))
        assert first.outputs == second.outputs
        running = asyncio.create_task(llm.generate(PROMPT, ENDLESS))
        with gated(llm._loaded()._loaded.executor) as gate:
            await asyncio.to_thread(gate.let, 2)
            closing = asyncio.create_task(llm.close())
            while not llm._loaded()._loop.closed:
                await asyncio.sleep(0.001)
            gate.open()
            await closing
        assert (await running).finish_reason == "abort"
        await llm.close()
        for call in (llm.generate, llm.score, lambda prompt: anext(llm.stream(prompt))):
            with pytest.raises(RequestError, match="closed"):
                await call(PROMPT)
        names = {thread.name for thread in set(threading.enumerate()) - before}
        assert not any(name.startswith("nybble") for name in names)

    asyncio.run(main())


def test_the_event_loop_runs_while_the_model_loads(tiny_artifact: Path, monkeypatch: Any) -> None:
    from nybble import async_llm

    loading = threading.Event()

    def slowly(*args: Any, **settings: Any) -> LLM:
        assert loading.wait(60)
        return LLM(*args, **settings)

    async def main() -> None:
        async def release() -> None:
            await asyncio.sleep(0)
            impatient.cancel()
            with pytest.raises(asyncio.CancelledError):
                await impatient
            loading.set()

        monkeypatch.setattr(async_llm, "open_llm", slowly)
        llm = AsyncLLM(tiny_artifact, executor="cpu", threads=1)
        impatient = asyncio.create_task(llm.load())
        await asyncio.gather(llm.load(), release())
        await llm.generate(PROMPT, PARAMS)
        await llm.close()

    asyncio.run(main())


def test_what_cannot_be_loaded_says_why_each_time(tmp_path: Path) -> None:
    async def main() -> None:
        llm = AsyncLLM(tmp_path / "nothing")
        for _ in range(2):
            with pytest.raises(ModelFormatError, match="no such folder"):
                await llm.generate(PROMPT)
        await llm.close()

    asyncio.run(main())
    with pytest.raises(TypeError):
        AsyncLLM(object.__new__(LLM), threads=1)


def test_a_model_that_is_dropped_is_freed(tiny_artifact: Path) -> None:
    llm = LLM(tiny_artifact, executor="cpu", threads=1)
    llm.generate(PROMPT, PARAMS)
    thread = llm._loop._thread
    assert thread is not None
    assert thread.is_alive()
    del llm
    gc.collect()
    deadline = time.monotonic() + 60
    while thread.is_alive() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not thread.is_alive()
