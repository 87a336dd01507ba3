"""Streamed text: whole characters, equal to the whole; stop strings are found wherever tokens end."""

import json
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nybble.runtime.detokenizer import (
    ByteLevelDetokenizer,
    Detokenizer,
    StopStrings,
    WindowDetokenizer,
    detokenizer,
)
from nybble.runtime.tokenizer import Tokenizer

# Beginnings and rests of characters, surrogates, overlong forms, numbers past Unicode's last.
INCOMPLETE = [
    b"\xc3",
    b"\xa9",
    b"\xe2\x82",
    b"\xf0\x9f",
    b"\xed\xa0\x80",
    b"\xc0\x80",
    b"\xf4\x90",
    b"\xff",
    b"a",
]
KINDS = ("byte_level", "metaspace", "prepend")


@pytest.fixture(scope="session")
def tokenizers(tokenizer_json: dict[str, bytes]) -> dict[str, Tokenizer]:
    config = json.dumps({"eos_token": "</s>"}).encode()
    return {
        kind: Tokenizer({"tokenizer.json": raw, "tokenizer_config.json": config})
        for kind, raw in tokenizer_json.items()
    }


def stream(tokenizer: Tokenizer, ids: list[int], made: Detokenizer | None = None) -> list[str]:
    made = made or detokenizer(tokenizer)
    return [made.push(i) for i in ids] + [made.finish()]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_pieces_of_any_tokens_make_the_whole(
    kind: str, tokenizers: dict[str, Tokenizer], data: st.DataObject
) -> None:
    tokenizer = tokenizers[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)
    assert "".join(stream(tokenizer, ids, WindowDetokenizer(tokenizer))) == tokenizer.decode(ids)


@settings(max_examples=300, deadline=None)
@given(
    raw=st.binary(max_size=12) | st.lists(st.sampled_from(INCOMPLETE)).map(b"".join), id=st.integers(0, 300)
)
def test_bytes_that_are_no_text_are_replaced_alike(
    raw: bytes, id: int, tokenizers: dict[str, Tokenizer]
) -> None:
    """Python's decoder and the library's put as many U+FFFD for the same bytes."""
    tokenizer = tokenizers["byte_level"]
    of_byte = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    ids = [*(of_byte[bytes([byte])] for byte in raw), id]
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


def test_only_byte_level_tokenizers_are_decoded_by_bytes(tokenizers: dict[str, Tokenizer]) -> None:
    made = {kind: type(detokenizer(tokenizer)) for kind, tokenizer in tokenizers.items()}
    assert made == {
        "byte_level": ByteLevelDetokenizer,
        "metaspace": WindowDetokenizer,
        "prepend": WindowDetokenizer,
    }


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=40) | st.text("ab é日🙂👩‍👧\u0301", max_size=40))
def test_no_piece_ends_inside_a_character(kind: str, tokenizers: dict[str, Tokenizer], text: str) -> None:
    tokenizer = tokenizers[kind]
    text = text.replace("\ufffd", "").replace("\0", "")
    ids = tokenizer.encode(text)
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    if kind == "byte_level" and not any("\ud800" <= c <= "\udfff" for c in text):
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("between", ["<s>", None])
def test_a_run_of_bytes_goes_on_across_tokens_without_a_text(
    tokenizers: dict[str, Tokenizer], between: str | None
) -> None:
    tokenizer = tokenizers["metaspace"]
    silent = tokenizer.vocab_size + 5 if between is None else tokenizer.token_id(between)
    ids = [tokenizer.token_id("<0x28>"), silent, tokenizer.token_id("<0x9E>")]
    assert None not in ids
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids) == "\ufffd\ufffd"


def test_text_arrives_with_its_token(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    ids = tokenizer.encode("plain words arrive at once")
    assert all(stream(tokenizer, ids)[:-1])


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("ab.", max_size=30),
    stops=st.lists(st.text("ab.", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=8),
)
def test_stop_strings_across_any_borders(text: str, stops: list[str], cuts: list[int]) -> None:
    ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
    expected = text[: min(ends)[1]] if ends else text

    borders = sorted({0, len(text), *(c for c in cuts if c < len(text))})
    looker = StopStrings(stops)
    shown = ""
    for start, end in pairwise(borders):
        piece = looker.push(text[start:end])
        shown += piece
        # Never more than the answer, so that nothing has to be taken back.
        assert expected.startswith(shown)
        if looker.found:
            break
    shown += looker.finish() if not looker.found else ""
    assert shown == expected
    assert (looker.found in stops) if ends else looker.found is None


def test_nothing_is_held_back_that_cannot_become_a_stop() -> None:
    looker = StopStrings(["<end>"])
    assert looker.push("hello <") == "hello "
    assert looker.push("b>") == "<b>"
    assert looker.push("<en") == ""
    assert looker.finish() == "<en"


def test_text_shown_before_looking_is_never_part_of_a_match() -> None:
    looker = StopStrings(["ab"])
    assert looker.push("xa", look=False) == "xa"
    assert looker.push("b.ab") == "b."
    assert looker.found == "ab"
