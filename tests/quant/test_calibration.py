"""Calibration text: what is read, what is chosen, and what is refused."""

import hashlib
import json
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest

from nybble.errors import CalibrationError
from nybble.quant.calibration import Calibration, evaluation_text, load_calibration
from nybble.quant.recipe import Recipe

SMALL = Recipe(samples=3, seq_len=4)


def encode(text: str) -> list[int]:
    return [ord(c) for c in text]


def render(messages: list[dict[str, Any]]) -> str:
    return "".join(f"<{m['role']}>{m['content']}" for m in messages)


def load(path: Path, recipe: Recipe = SMALL) -> Calibration:
    return load_calibration(path, encode=encode, recipe=recipe, render=render)


def refusal(path: Path, recipe: Recipe = SMALL) -> str:
    with pytest.raises(CalibrationError) as caught:
        load(path, recipe)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_text_of_just_enough_tokens_is_taken_in_order(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"abcdefghijkl\r\n")
    found = load(path)
    assert found.token_ids.dtype == np.int32
    assert ["".join(map(chr, row)) for row in found.token_ids] == ["abcd", "efgh", "ijkl"]
    assert found.digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert found.origin == "text.txt"


def test_seed_chooses_from_a_longer_text(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("".join(chr(1000 + i) for i in range(400)), encoding="utf-8")
    first, again = load(path), load(path)
    other = load(path, Recipe(samples=3, seq_len=4, seed=1))
    assert np.array_equal(first.token_ids, again.token_ids)
    assert not np.array_equal(first.token_ids, other.token_ids)
    for row in (*first.token_ids, *other.token_ids):
        assert (row[0] - 1000) % 4 == 0
        assert np.array_equal(np.diff(row), [1, 1, 1])
    assert len({int(row[0]) for row in first.token_ids}) == 3


def test_default_text_and_evaluation_text_share_nothing() -> None:
    names = sorted(topics)
    even = "\n\n".join(topics[name] for name in names[::2])
    found = load_calibration(None, encode=encode, recipe=SMALL)
    assert found.digest == hashlib.sha256(even.encode()).hexdigest()
    assert found.origin == "pydoc_data.topics"
    assert evaluation_text() == "\n\n".join(topics[name] for name in names[1::2])


def test_jsonl_of_text_and_messages(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    messages = [{"role": "user", "content": "hé"}, {"role": "assistant", "content": "ho"}]
    lines = [json.dumps({"text": "one\u2028two"}, ensure_ascii=False), "", json.dumps({"messages": messages})]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    text = "one\u2028two\n\n<user>hé<assistant>ho"
    assert load(path).digest == hashlib.sha256(text.encode()).hexdigest()


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"\xef\xbb\xbfabcdefghijkl")
    assert load(path).token_ids[0, 0] == ord("a")


def test_refusals(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("abcdefghijk", encoding="utf-8")
    assert "holds 11 tokens; 3 samples of 4 need 12" in refusal(path)
    path.write_bytes(b"")
    assert "holds 0 tokens" in refusal(path)
    path.write_bytes(b"abcdefghijklmn\xffop")
    assert "byte 14 is not UTF-8" in refusal(path)
    path.write_bytes(b"\xef\xbb\xbfabc\xff")
    assert "byte 6 is not UTF-8" in refusal(path)
    assert "No such file" in refusal(tmp_path / "absent.txt")
    assert "directory" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("3", "expected an object"),
        ('{"text": 5}', "expected an object"),
        ('{"messages": []}', "expected an object"),
        ('{"messages": ["hello"]}', "expected an object"),
    ],
)
def test_bad_jsonl_names_the_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text('{"text": "good"}\n\n' + line + "\n", encoding="utf-8")
    found = refusal(path)
    assert "chats.jsonl: line 3: " in found
    assert message in found


def test_messages_without_a_template(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "x"}]}', encoding="utf-8")
    with pytest.raises(CalibrationError, match="no chat template"):
        load_calibration(path, encode=encode, recipe=SMALL)
