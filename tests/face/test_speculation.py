"""`LLM(speculation=...)`: the same answers whoever guesses, and one line for what cannot be."""

from pathlib import Path

import pytest

from nybble import LLM, SamplingParams
from nybble.errors import DoesNotFitError, ModelFormatError, SettingError
from nybble.runtime.speculation import DraftModelProposer, NgramProposer

PROMPTS = ["The class statement defines a class. The class statement", "a b a b a b"]
PARAMS = [SamplingParams(max_tokens=40), SamplingParams(max_tokens=40, temperature=0.8, seed=4, logprobs=1)]


def answers(path: Path, **settings: object) -> list[object]:
    with LLM(path, threads=1, max_model_len=128, **settings) as llm:  # type: ignore[arg-type]
        return [output.outputs for output in llm.generate(PROMPTS, PARAMS)]


def test_answers_are_the_same(tiny_artifact: Path) -> None:
    plain = answers(tiny_artifact, speculation="off")
    for speculation in ("auto", "ngram", tiny_artifact, str(tiny_artifact)):
        assert answers(tiny_artifact, speculation=speculation) == plain


def test_what_guesses(tiny_artifact: Path) -> None:
    for speculation, executor, expected in (
        ("auto", "cpu", NgramProposer),
        ("auto", "ort", None),
        ("off", "cpu", None),
        ("ngram", "ort", NgramProposer),
        (tiny_artifact, "cpu", DraftModelProposer),
    ):
        with LLM(tiny_artifact, executor=executor, max_model_len=64, speculation=speculation) as llm:
            speculator = llm._loaded.speculator
            found = None if speculator is None else type(speculator._proposer)
            assert found == expected


def test_a_draft_counts_toward_the_budget(tiny_artifact: Path) -> None:
    with LLM(tiny_artifact, max_model_len=64, max_sequences=1, cache=False) as llm:
        assert llm.max_model_len == 64
    with pytest.raises(DoesNotFitError, match=r"speculation: draft model .*needs .* budget"):
        LLM(tiny_artifact, max_model_len=64, memory_budget="40MB", speculation=tiny_artifact)


def test_settings_that_cannot_be(tiny_artifact: Path, smollm2_gguf: Path, tmp_path: Path) -> None:
    with pytest.raises(
        SettingError, match="speculation is 3; expected auto, off, ngram or the path of a model"
    ):
        LLM(tiny_artifact, speculation=3)  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="speculation is ''; expected"):
        LLM(tiny_artifact, speculation="")
    with pytest.raises(ModelFormatError):
        LLM(tiny_artifact, speculation=tmp_path)
    with pytest.raises(SettingError, match="has other tokens than the model; expected the same"):
        LLM(smollm2_gguf, max_model_len=64, speculation=tiny_artifact)
