"""Answers of a given form, asked of `LLM`."""

import asyncio
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from nybble import LLM, AsyncLLM, SamplingParams
from nybble.errors import SettingError
from nybble.runtime.constraint import Constraints

pytest.importorskip("llguidance")


def params(regex: str) -> SamplingParams:
    return SamplingParams(regex=regex, max_tokens=30)


def test_grammars_are_compiled_where_they_are_asked_for(
    tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not on the engine's thread, where every answer would wait for it."""
    threads: list[str] = []
    compile_one = Constraints._compile

    def compiled(self: Constraints, name: str, text: str) -> Any:
        threads.append(threading.current_thread().name)
        return compile_one(self, name, text)

    monkeypatch.setattr(Constraints, "_compile", compiled)
    with LLM(tiny_artifact, executor="cpu", threads=1) as llm:
        assert re.fullmatch("[ab]{3}", llm.generate("x", params("[ab]{3}")).text)
        assert re.fullmatch("[cd]{2}", "".join(piece.text for piece in llm.stream("x", params("[cd]{2}"))))

        async def ask() -> str:
            return (await AsyncLLM(llm).generate("x", params("[ef]{4}"))).text

        assert re.fullmatch("[ef]{4}", asyncio.run(ask()))
    assert len(threads) == 3
    assert "nybble-engine" not in threads


def test_a_bad_pattern_is_refused_by_its_prompt_and_the_rest_does_not_run(tiny_artifact: Path) -> None:
    with LLM(tiny_artifact, executor="cpu", threads=1) as llm:
        with pytest.raises(SettingError, match=r"^prompt 1: regex cannot be used: [^\n|]*unclosed group$"):
            llm.generate(["x", "y"], [params("a"), params("(")])
        assert llm.statistics().requests_added == 0
