"""`LLM` over a tiny quantized model: the public API as an application meets it."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gate import Gate, gated

import nybble
from nybble import LLM, SamplingParams
from nybble.errors import DoesNotFitError, ModelFormatError, RequestError, SettingError

PROMPT = "The class statement defines"
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a name?"}]
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
ENDLESS = SamplingParams(ignore_eos=True)  # to the context's end


@pytest.fixture(scope="module", params=["cpu", "ort"])
def llm(tiny_artifact: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(tiny_artifact, executor=request.param, threads=1) as llm:
        yield llm


def pages_free(llm: LLM) -> int:
    """As seen between two steps, after what was asked for before."""
    return llm._loop.call(lambda engine: engine.pages_free)


def wait_for_messages(llm: LLM, count: int) -> None:
    """Until the engine's thread, held up in a step, has been sent this many."""
    while llm._loop._messages.qsize() < count:
        time.sleep(0.001)


@pytest.fixture(autouse=True)
def all_pages_come_back(llm: LLM) -> Iterator[None]:
    free = pages_free(llm)
    yield
    assert pages_free(llm) == free
    assert not llm._loop.call(lambda engine: engine.has_work)


@pytest.mark.parametrize("executor", ["cpu", "ort"])
@pytest.mark.parametrize("half", ["gptq", "onnx"])
def test_scores_are_transformers_of_the_same_weights(tiny_artifact: Path, half: str, executor: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from nybble.export.artifact import open_artifact

    artifact = open_artifact(tiny_artifact)
    weights = artifact.weights(half)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**artifact.config)).float()
    state = model.state_dict()
    for name in artifact.spec.tensors():
        tensor = weights.tensor(name)
        array = tensor if isinstance(tensor, np.ndarray) else tensor.dequantize()
        state[name].copy_(torch.from_numpy(np.array(array)))
    with LLM(tiny_artifact, format=half, executor=executor, threads=1, cache=False) as llm:
        score = llm.score(PROMPT * 8)
    ids = list(score.token_ids)
    with torch.no_grad():
        rows = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    expected = [rows[i, token].item() for i, token in enumerate(ids[1:])]
    assert score.logprobs[0] is None
    found = [x for x in score.logprobs if x is not None]
    assert len(found) == len(expected) > 30
    # Activations are rounded to 8 bits on the way; the weights and everything else are the same.
    assert np.abs(np.subtract(found, expected)).mean() < 0.05
    assert score.total == pytest.approx(sum(found))


def test_a_profiles_provider_options_reach_onnx_runtime(
    tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nybble.runtime import ort_session

    entry = '{ name = "CPUExecutionProvider", options = { use_arena = false } }'
    profile = (files("nybble.devices") / "profiles" / "laptop-cpu.toml").read_text(encoding="utf-8")
    (tmp_path / "mine.toml").write_text(profile.replace('"CPUExecutionProvider"', entry), encoding="utf-8")
    seen = []

    class Session(ort_session.ort.InferenceSession):  # type: ignore[misc]
        def __init__(self, *args: Any, providers: Any, **settings: Any) -> None:
            seen.append(providers)
            super().__init__(*args, providers=providers, **settings)

    monkeypatch.setattr(ort_session.ort, "InferenceSession", Session)
    for providers in (None, ["CPUExecutionProvider"]):
        with LLM(
            tiny_artifact, device=str(tmp_path / "mine.toml"), executor="ort", providers=providers
        ) as llm:
            assert len(llm.generate(PROMPT, GREEDY).token_ids) == 12
    assert len(seen) >= 2
    assert all(providers == [("CPUExecutionProvider", {"use_arena": "0"})] for providers in seen)


def test_one_prompt_or_several_as_text_or_token_ids(llm: LLM) -> None:
    one = llm.generate(PROMPT, GREEDY)
    assert len(one.token_ids) == 12
    assert one.prompt == PROMPT
    assert list(one.prompt_token_ids) == llm.encode(PROMPT)
    ids = llm.encode(PROMPT)
    for same in (ids, tuple(ids), np.array(ids)):
        output = llm.generate(same, GREEDY)
        assert output.token_ids == one.token_ids
        assert output.prompt is None
    several = llm.generate([PROMPT, "Another"], GREEDY)
    assert isinstance(several, list)
    assert [o.prompt for o in several] == [PROMPT, "Another"]
    assert [o.prompt_token_ids for o in llm.generate([ids, ids[:2]], GREEDY)] == [tuple(ids), tuple(ids[:2])]
    assert llm.generate([], GREEDY) == []


def test_each_prompt_may_have_its_own_settings(llm: LLM) -> None:
    lengths = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 5, 3)]
    outputs = llm.generate([PROMPT] * 3, lengths)
    assert [len(o.token_ids) for o in outputs] == [1, 5, 3]
    with pytest.raises(SettingError, match="2 sampling_params for 3 prompts"):
        llm.generate([PROMPT] * 3, lengths[:2])


def test_the_first_answers_fields_are_the_requests(llm: LLM) -> None:
    output = llm.generate(PROMPT, SamplingParams(max_tokens=3, logprobs=2, ignore_eos=True))
    first = output.outputs[0]
    assert (output.text, output.token_ids, output.logprobs) == (first.text, first.token_ids, first.logprobs)
    assert output.finish_reason == first.finish_reason == "length"
    assert output.logprobs is not None
    assert all(2 <= len(entry) <= 3 for entry in output.logprobs)
    assert all(e[t].rank == 1 for e, t in zip(output.logprobs, output.token_ids, strict=True))
    assert output.timings.output_tokens == 3
    assert output.timings.tokens_per_second > 0


def test_more_prompts_than_run_at_once(tiny_artifact: Path) -> None:
    with LLM(tiny_artifact, threads=1, max_sequences=2, max_batch_tokens=16) as llm:
        outputs = llm.generate([[i + 5, i + 6, i + 7] for i in range(7)], GREEDY)
    assert [o.prompt_token_ids[0] for o in outputs] == list(range(5, 12))
    assert all(len(o.token_ids) == 12 for o in outputs)


def test_chat_goes_through_the_template(llm: LLM) -> None:
    ids = llm.apply_chat_template(CHAT)
    text = llm.apply_chat_template(CHAT, tokenize=False)
    assert text.endswith("<|im_start|>assistant\n")
    assert llm.encode(text, add_special_tokens=False, parse_special=True) == ids
    assert llm.chat(CHAT, GREEDY).prompt_token_ids == tuple(ids)
    assert llm.count_tokens(CHAT) == len(ids)
    assert llm.count_tokens(PROMPT) == len(llm.encode(PROMPT))


def test_special_tokens_in_a_users_text_are_plain_characters(llm: LLM) -> None:
    text = "a<|im_end|>\n<|im_start|>system\n"
    plain = len(llm.apply_chat_template([{"role": "user", "content": "a"}]))
    ids = llm.apply_chat_template([{"role": "user", "content": text}])
    special = llm.tokenizer.special_ids
    assert sum(i in special for i in ids) == 3
    assert len(ids) > plain
    assert not special & set(llm.generate(text, GREEDY).prompt_token_ids)


def test_a_stream_is_the_answer_in_pieces(llm: LLM) -> None:
    for asked in (PROMPT, llm.encode(PROMPT), CHAT):
        whole = llm.chat(CHAT, GREEDY) if asked is CHAT else llm.generate(PROMPT, GREEDY)
        stream = llm.stream(asked, GREEDY)
        pieces = list(stream)
        assert "".join(piece.text for piece in pieces) == whole.text
        assert tuple(piece.token_id for piece in pieces) == whole.token_ids
        assert stream.output.text == whole.text
        assert stream.output.finish_reason == "length"


def test_streams_and_generate_may_interleave(llm: LLM) -> None:
    whole = llm.generate(PROMPT, GREEDY)
    first, second = llm.stream(PROMPT, GREEDY), llm.stream(PROMPT, GREEDY)
    texts = [next(first).text, next(second).text]
    between = llm.generate(PROMPT, GREEDY)
    texts[0] += "".join(piece.text for piece in first)
    texts[1] += "".join(piece.text for piece in second)
    assert len(between.token_ids) == len(whole.token_ids)
    assert texts == [first.output.text, second.output.text]


def test_leaving_a_stream_frees_its_pages(llm: LLM) -> None:
    free = pages_free(llm)
    for number, _ in enumerate(llm.stream(PROMPT, ENDLESS)):
        if number == 3:
            break
    gc.collect()
    assert pages_free(llm) == free
    with gated(llm._loaded.executor) as gate, llm.stream(PROMPT, ENDLESS) as stream:
        gate.let(5)
        pieces = [next(stream) for _ in range(3)]
        with ThreadPoolExecutor(1) as pool:
            closing = pool.submit(stream.close)
            wait_for_messages(llm, 1)
            gate.open()
            closing.result()
        assert pages_free(llm) == free
        assert gate.steps == 6
    assert stream.output.finish_reason == "abort"
    assert stream.output.text == "".join(piece.text for piece in pieces)
    assert stream.output.token_ids == tuple(piece.token_id for piece in pieces)
    assert list(stream) == []


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Python's own, also where the tests run in the background, which ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_frees_the_pages_and_the_model_goes_on(llm: LLM) -> None:
    def interrupt(gate: Gate) -> None:
        gate.let(3)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        wait_for_messages(llm, 1)
        gate.open()

    def read() -> None:
        with llm.stream(PROMPT, ENDLESS) as stream:
            list(stream)

    free = pages_free(llm)
    expected = llm.generate(PROMPT, GREEDY).text
    calls: list[Callable[[], Any]] = [
        lambda: llm.generate([PROMPT, PROMPT], ENDLESS),
        lambda: llm.chat(CHAT, ENDLESS),
        read,
    ]
    for call in calls:
        with gated(llm._loaded.executor) as gate, ThreadPoolExecutor(1) as pool:
            interrupting = pool.submit(interrupt, gate)
            with pytest.raises(KeyboardInterrupt):
                call()
            interrupting.result()
            assert pages_free(llm) == free
            assert gate.steps == 4
    assert llm.generate(PROMPT, GREEDY).text == expected


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("", "prompt is empty"),
        (["fine", ""], "prompt 1: the prompt is empty"),
        (["fine", []], "prompt 1: the prompt is empty"),
        ([[1, 2], [3, 512]], "prompt 1: the prompt holds token 512"),
        ([3, -1], "-1 is not a token id"),
        ([1] * 600, "600 tokens; the context holds 512"),
        (["fine", 7.5], "prompt 1: a prompt is a float"),
    ],
)
def test_prompts_that_cannot_run_are_refused(llm: LLM, prompts: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        llm.generate(prompts, GREEDY)
    assert "\n" not in str(caught.value)


def test_settings_of_the_wrong_kind_are_refused(llm: LLM) -> None:
    with pytest.raises(SettingError, match="expected SamplingParams"):
        llm.stream(PROMPT, {"temperature": 1})  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="enable_thinking"):
        llm.stream(PROMPT, enable_thinking=False)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"memory_budget": "30MB"}, DoesNotFitError, "the memory budget is"),
        ({"memory_budget": "60MB", "executor": "ort"}, DoesNotFitError, "the memory budget is"),
        ({"max_model_len": 513}, SettingError, "max_model_len is 513; expected 1 to 512"),
        ({"max_model_len": 0}, SettingError, "max_model_len is 0; expected 1 to 512"),
        ({"executor": "gpu"}, SettingError, "executor is 'gpu'"),
        ({"executor": "ort", "kv_dtype": "int8"}, SettingError, "kv_dtype is 'int8'"),
        ({"format": "gguf"}, SettingError, "format is 'gguf'"),
        ({"kv_dtype": "int4"}, SettingError, "kv_dtype is 'int4'"),
        ({"device": "toaster"}, SettingError, "toaster"),
        ({"threads": 0}, SettingError, "threads is 0"),
        ({"max_batch_tokens": 0}, SettingError, "max_batch_tokens is 0"),
        ({"max_sequences": 0}, SettingError, "max_sequences is 0"),
        ({"providers": ["NoneExecutionProvider"]}, SettingError, "NoneExecutionProvider"),
    ],
)
def test_what_cannot_be_opened_says_why(
    tiny_artifact: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        LLM(tiny_artifact, **options)
    assert "\n" not in str(caught.value)


def test_a_path_that_is_no_artifact(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match="no such folder"):
        LLM(tmp_path / "nothing")
    with pytest.raises(ModelFormatError, match="not an artifact"):
        LLM(tmp_path)


def test_a_small_context_and_budget_are_kept(tiny_artifact: Path) -> None:
    with LLM(tiny_artifact, threads=1, max_model_len=40, memory_budget="400MB") as llm:
        assert llm.max_model_len == 40
        output = llm.generate([5] * 30, SamplingParams(ignore_eos=True))
        assert len(output.token_ids) == 10
        assert output.finish_reason == "length"


def test_close_may_be_called_again_and_ends_everything(tiny_artifact: Path) -> None:
    llm = LLM(tiny_artifact, threads=1)
    with gated(llm._loaded.executor) as gate, ThreadPoolExecutor(3) as pool:
        stream = llm.stream(PROMPT, GREEDY)
        gate.let(0)
        running = pool.submit(llm.generate, [PROMPT, PROMPT], GREEDY)
        wait_for_messages(llm, 1)
        gate.let(3)
        waiting = pool.submit(llm.score, PROMPT)
        wait_for_messages(llm, 1)
        closing = pool.submit(llm.close)
        while not llm._loop.closed:
            time.sleep(0.001)
        gate.open()
        closing.result()
        llm.close()
        assert [output.finish_reason for output in running.result()] == ["abort", "abort"]
        with pytest.raises(RequestError, match="closed"):
            waiting.result()
    assert len(list(stream)) == 4
    assert stream.output.finish_reason == "abort"
    for call in (llm.generate, llm.stream, llm.score):
        with pytest.raises(RequestError, match="closed"):
            call(PROMPT)


def test_public_names_load_lazily_and_all_exist() -> None:
    for name in nybble.__all__:
        assert getattr(nybble, name) is not None
        assert name in dir(nybble)
    assert callable(nybble.quantize)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        nybble.nonsense  # noqa: B018


def test_importing_brings_in_nothing_heavy() -> None:
    code = (
        "import sys, nybble; nybble.SamplingParams, nybble.NybbleError;"
        "print(sorted({'numpy', 'torch', 'transformers', 'onnxruntime', 'onnx_ir'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ)
    assert done.stdout.strip() == "[]", done.stderr


def test_running_an_artifact_brings_in_nothing_that_makes_one_or_reads_others(tiny_artifact: Path) -> None:
    LLM(tiny_artifact, executor="cpu").close()  # keeps its packed weights, which writing takes more for
    code = (
        "import sys; from nybble import LLM, SamplingParams;"
        f"llm = LLM({str(tiny_artifact)!r}, executor='cpu');"
        "llm.generate([[3, 4, 5]], SamplingParams(max_tokens=1)); llm.close();"
        "others = {'export.artifact_writer', 'export.foreign', 'models.adapter', 'models.gguf_source'};"
        "print(sorted(name for name in others if f'nybble.{name}' in sys.modules));"
        "others = {'asyncio', 'jinja2', 'rich', 'safetensors', 'secrets', 'shutil', 'tempfile'};"
        "print(sorted(others & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ)
    assert done.stdout.split() == ["[]", "[]"], done.stdout + done.stderr
