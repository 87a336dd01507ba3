"""Which turns a conversation loses when it has outgrown the context."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nybble import LLM, SamplingParams
from nybble.chat_fit import fit_chat
from nybble.errors import RequestError, SettingError

Message = dict[str, Any]


def encode(messages: Sequence[Any]) -> list[int]:
    """As many tokens as each message says, all its number, and two for the start of the answer."""
    return [m["number"] for m in messages for _ in range(m["length"])] + [-1, -1]


@st.composite
def turns(draw: st.DrawFn) -> list[list[Message]]:
    """A system message or two or none, then turns, some with tool calls and their results."""
    numbers = iter(range(10_000))

    def message(role: str) -> Message:
        return {"role": role, "number": next(numbers), "length": draw(st.integers(0, 40))}

    head = [message(role) for role in draw(st.lists(st.sampled_from(["system", "developer"]), max_size=2))]
    listed = [head]
    for _ in range(draw(st.integers(1, 12))):
        calls = draw(st.integers(0, 2))
        listed.append([message("user"), *(message(r) for r in ["assistant", "tool"] * calls)])
        if draw(st.booleans()):
            listed[-1].append(message("assistant"))
    return listed


@given(turns(), st.integers(8, 200), st.none() | st.integers(1, 300))
def test_the_oldest_turns_go_and_no_more_than_it_takes(
    turns: list[list[Message]], context: int, max_tokens: int | None
) -> None:
    head, *rest = turns
    messages = [m for turn in turns for m in turn]
    ids, dropped = fit_chat(messages, encode, context, max_tokens)
    quarter = context // 4
    room = quarter if max_tokens is None else min(max_tokens, quarter)
    count = len(encode(messages))
    starts = {sum(map(len, rest[:n])): n for n in range(len(rest))}
    assert dropped in starts  # whole turns, and never the last
    assert ids == encode(head + messages[len(head) + dropped :])
    if count + room <= context:
        assert dropped == 0
        return
    if starts[dropped] < len(rest) - 1:
        assert len(ids) + room <= context
    if dropped:
        kept_one_more = messages[len(head) + dropped - len(rest[starts[dropped] - 1]) :]
        # It exceeded, or the quarter to which what is dropped is rounded up would not have been reached.
        assert len(encode(head + kept_one_more)) + room > context - quarter


@given(turns(), st.integers(40, 200))
def test_a_chat_that_goes_on_keeps_its_beginning_for_a_quarter_of_the_context(
    turns: list[list[Message]], context: int
) -> None:
    total, starts = 0, set()
    for n in range(2, len(turns) + 1):
        messages = [m for turn in turns[:n] for m in turn]
        total = len(encode(messages))
        kept_last_only = sum(map(len, turns[1 : n - 1]))
        _, dropped = fit_chat(messages, encode, context, None)
        if dropped < kept_last_only:
            starts.add(dropped)
    assert len(starts) <= 1 + -(-total // (context // 4))


@pytest.fixture(scope="module")
def llm(tiny_artifact: Path) -> Any:
    with LLM(tiny_artifact, executor="cpu", threads=1, max_model_len=128) as llm:
        yield llm


def conversation(turns: int) -> list[Message]:
    messages = [{"role": "system", "content": "Be brief."}]
    for number in range(turns):
        messages += [
            {"role": "user", "content": f"What is {number}?"},
            {"role": "assistant", "content": f"A number, {number}."},
        ]
    return [*messages, {"role": "user", "content": "Why?"}]


PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)


def test_chat_and_stream_say_how_many_messages_were_dropped(llm: LLM) -> None:
    short, long = conversation(1), conversation(12)
    assert llm.chat(short, PARAMS).dropped_messages == 0
    output = llm.chat(long, PARAMS)
    dropped = output.dropped_messages
    assert 0 < dropped < len(long) - 2
    kept = [long[0], *long[1 + dropped :]]
    assert kept[1]["role"] == "user"
    assert list(output.prompt_token_ids) == llm.apply_chat_template(kept)
    assert output.outputs == llm.chat(kept, PARAMS).outputs
    with llm.stream(long, PARAMS) as stream:
        assert stream.dropped_messages == dropped
        list(stream)
    assert stream.output.outputs == output.outputs
    assert stream.output.dropped_messages == dropped


def test_a_chat_may_be_refused_instead(llm: LLM) -> None:
    for call in (llm.chat, llm.stream):
        with pytest.raises(RequestError, match="the context holds 128"):
            call(conversation(12), PARAMS, on_overflow="refuse")
        with pytest.raises(SettingError, match="on_overflow is 'maybe'; expected drop or refuse"):
            call(conversation(1), PARAMS, on_overflow="maybe")  # type: ignore[arg-type]
    # The last turn alone is too long.
    with pytest.raises(RequestError, match="the context holds 128"):
        llm.chat([*conversation(1)[:-1], {"role": "user", "content": "Why? " * 90}], PARAMS)


def test_the_command_says_so(
    nybble: Callable[..., Any], tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["What is a name?"] * 8
    for how in ("drop", "refuse"):
        lines = iter([*asked, "/exit"])
        monkeypatch.setattr("builtins.input", lambda prompt, lines=lines: next(lines))
        arguments = ("chat", tiny_artifact, "--max-tokens", "8", "--max-model-len", "96", "--ignore-eos")
        result = nybble(*arguments, "--on-overflow", how, "--stats")
        assert result.code == 0, result.err
        assert ("the model no longer sees the" in result.out) == (how == "drop")
        assert ("/reset starts again" in result.out) == (how == "refuse")
        assert (result.err.count("answer tokens") == len(asked)) == (how == "drop")
