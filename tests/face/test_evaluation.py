"""`nybble eval` and `nybble compare`: figures that another way of computing them gives, too."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoders import load
from hypothesis import given
from hypothesis import strategies as st

from nybble import LLM, CalibrationError, ModelFormatError, RequestError, SettingError
from nybble.evaluation import Comparison, evaluate, evaluate_all
from nybble.export import open_artifact
from nybble.multiple_choice import read_questions, standard_error, tokens_of

TEXT = "The quick brown fox jumps over the lazy dog. " * 60
SHORT = {"windows": 3, "window_tokens": 40, "threads": 1}
RIGHT = {"question": "The quick brown fox", "choices": ["jumps", "sleeps today"], "answer": 0}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


def write_tasks(path: Path, *records: object) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records))
    return path


def test_perplexity_is_that_of_the_scores(tiny_artifact: Path, text: Path) -> None:
    found = evaluate(tiny_artifact, text=text, **SHORT)
    with LLM(tiny_artifact, threads=1) as llm:
        ids = llm.encode(TEXT, add_special_tokens=False)[:120]
        scores = [llm.score(ids[begin : begin + 40]).logprobs[1:] for begin in (0, 40, 80)]
    assert found.perplexity == pytest.approx(np.exp(-np.mean(np.array(scores, np.float64))), rel=1e-5)
    assert found.comparison is None
    assert found.tasks is None


def test_a_model_loses_nothing_against_itself(tiny_artifact: Path, text: Path) -> None:
    found = evaluate(tiny_artifact, text=text, reference=tiny_artifact, **SHORT)
    expected = Comparison(str(tiny_artifact), found.perplexity, 0.0, 0.0, 0.0, 1.0)
    assert found.comparison is not None
    for name in ("perplexity", "mean_kl", "p99_kl", "max_kl", "top1_agreement"):
        assert getattr(found.comparison, name) == pytest.approx(getattr(expected, name), abs=1e-6)


def test_a_reference_is_the_model_in_float32(
    tiny_artifact: Path, make_tiny_model: Callable[..., Path], text: Path
) -> None:
    """Against transformers: its perplexity, and the divergence of what runs here from it."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    source = make_tiny_model()
    found = evaluate(tiny_artifact, text=text, reference=source, **SHORT)
    with LLM(tiny_artifact, threads=1) as llm:
        ids = np.array(llm.encode(TEXT, add_special_tokens=False)[:120]).reshape(3, 40)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.from_numpy(ids)).logits
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, logits.shape[-1]), torch.from_numpy(ids[:, 1:]).reshape(-1)
    )
    assert found.comparison is not None
    assert found.comparison.perplexity == pytest.approx(float(losses.exp()), rel=1e-4)
    assert 0 < found.comparison.mean_kl < 0.1
    assert found.comparison.mean_kl <= found.comparison.p99_kl <= found.comparison.max_kl
    assert 0.5 < found.comparison.top1_agreement <= 1


def test_several_models_are_each_as_alone(tiny_artifact: Path, text: Path) -> None:
    both = evaluate_all([tiny_artifact, tiny_artifact], text=text, reference=tiny_artifact, **SHORT)
    alone = evaluate(tiny_artifact, text=text, reference=tiny_artifact, **SHORT)
    assert both == [alone, alone]


def test_the_most_likely_choice_is_the_one_of_the_scores(tiny_artifact: Path, tmp_path: Path) -> None:
    choices = ["jumps over", "sleeps", "the lazy dog is here"]
    with LLM(tiny_artifact, threads=1) as llm:
        [question] = read_questions(write_tasks(tmp_path / "one.jsonl", RIGHT | {"choices": choices}))
        likely = []
        for choice in choices:
            ids, begin = tokens_of(question, choice, llm.tokenizer)
            assert llm.decode(ids) == f"The quick brown fox {choice}"
            likely.append(sum(llm.score(ids).logprobs[begin:]))  # type: ignore[arg-type]
    best = int(np.argmax(likely))
    lengths = [len(choice) for choice in choices]
    best_by_length = int(np.argmax(np.array(likely) / lengths))
    records = [RIGHT | {"choices": choices, "answer": answer} for answer in range(3)]
    tasks = write_tasks(tmp_path / "three.jsonl", *records, records[best])
    found = evaluate(tiny_artifact, tasks=tasks, **SHORT | {"window_tokens": 16}).tasks
    assert found is not None
    assert found.questions == 4
    assert found.accuracy == 0.5  # one of three, and the best again
    assert found.accuracy_by_length == (0.5 if best == best_by_length else 0.25)


@given(right=st.lists(st.booleans(), min_size=2, max_size=60))
def test_the_standard_error_is_that_of_the_mean(right: list[bool]) -> None:
    expected = np.std(right, ddof=1) / np.sqrt(len(right))
    assert standard_error(float(np.mean(right)), len(right)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("not JSON", "line 2: is not JSON"),
        ("[1]", "line 2: expected an object"),
        ('{"question": "", "choices": ["a", "b"], "answer": 0}', "line 2: question is ''"),
        ('{"question": "q", "choices": ["a"], "answer": 0}', "line 2: choices is"),
        ('{"question": "q", "choices": ["a", " "], "answer": 0}', "line 2: choices is"),
        ('{"question": "q", "choices": ["a", "b"], "answer": 2}', "line 2: answer is 2; expected .* 0 to 1"),
        ('{"question": "q", "choices": ["a", "b"], "answer": true}', "line 2: answer is True"),
    ],
)
def test_a_bad_question_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(RIGHT) + "\n" + line)
    with pytest.raises(CalibrationError, match=message):
        read_questions(path)


def test_what_cannot_be_evaluated(tiny_artifact: Path, tmp_path: Path, text: Path) -> None:
    with pytest.raises(SettingError, match="windows is 0"):
        evaluate(tiny_artifact, windows=0)
    with pytest.raises(CalibrationError, match=r"text.txt: holds \d+ tokens; 900 windows"):
        evaluate(tiny_artifact, text=text, windows=900, window_tokens=40)
    with pytest.raises(CalibrationError, match=r"none.jsonl: cannot be read"):
        evaluate(tiny_artifact, tasks=tmp_path / "none.jsonl")
    long = write_tasks(tmp_path / "long.jsonl", RIGHT | {"question": TEXT * 20})
    with pytest.raises(RequestError, match=r"long.jsonl: line 1: has \d+ tokens .* the context"):
        evaluate(tiny_artifact, tasks=long, text=text, **SHORT)


def test_other_tokens_are_no_reference(
    tiny_artifact: Path, make_tiny_model: Callable[..., Path], text: Path
) -> None:
    other = make_tiny_model(vocab_size=load(make_tiny_model()).spec.vocab_size + 16)
    with pytest.raises(ModelFormatError, match="has other tokens"):
        evaluate(tiny_artifact, text=text, reference=other, **SHORT)


def test_the_command(nybble: Callable[..., Any], tiny_artifact: Path, tmp_path: Path, text: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_artifact, copy)
    short = ("--text", text, "--windows", "2", "--window-tokens", "40", "--threads", "1")
    tasks = write_tasks(tmp_path / "tasks.jsonl", RIGHT, RIGHT)
    plot = tmp_path / "errors.png"
    done = nybble(
        "eval", copy, *short, "--reference", tiny_artifact, "--tasks", tasks, "--plot", plot, "--save"
    )
    assert done.code == 0, done.err
    for words in ("Perplexity", "Reference", "KL divergence", "Same top-1", "Right by length"):
        assert words in done.out
    assert plot.read_bytes().startswith(b"\x89PNG")
    shown = json.loads(nybble("eval", copy, *short, "--json").out)
    kept = open_artifact(copy).manifest.quality
    assert kept is not None
    assert kept["evaluation"]["perplexity"] == pytest.approx(shown["perplexity"])
    assert open_artifact(copy).digest != open_artifact(tiny_artifact).digest
    refused = nybble("eval", tmp_path, *short)
    assert refused.code == 1
    assert "is not an artifact" in refused.error


def test_models_in_one_table(
    nybble: Callable[..., Any], tiny_artifact: Path, tmp_path: Path, text: Path
) -> None:
    copy, plot = tmp_path / "copy", tmp_path / "sizes.png"
    shutil.copytree(tiny_artifact, copy)
    short = ("--text", text, "--windows", "2", "--window-tokens", "40", "--threads", "1", "--no-speed")
    done = nybble("compare", tiny_artifact, copy, *short, "--reference", tiny_artifact, "--plot", plot)
    assert done.code == 0, done.err
    assert "same top-1" in done.out
    assert "decode tokens/s" not in done.out
    assert plot.read_bytes().startswith(b"\x89PNG")
    one, other = json.loads(nybble("compare", tiny_artifact, copy, *short, "--json").out)
    assert one["name"] == tiny_artifact.name
    assert {**one, "name": None} == {**other, "name": None}
    assert 4 < one["bits"] < 9
