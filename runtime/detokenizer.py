"""Tokens to text while they arrive: whole characters only, and no part of a stop string."""

import codecs
from collections.abc import Sequence
from typing import Protocol

from .tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """Text piece by piece. The pieces together are `tokenizer.decode` of all tokens, and none ends inside a
    UTF-8 character."""

    def push(self, token: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
        ...

    def finish(self) -> str:
        """What is left at the end, incomplete characters as U+FFFD."""
        ...


def detokenizer(tokenizer: Tokenizer) -> Detokenizer:
    """One for a text of this tokenizer's tokens."""
    return ByteLevelDetokenizer(tokenizer) if tokenizer.is_byte_level else WindowDetokenizer(tokenizer)


class ByteLevelDetokenizer:
    """`Detokenizer` of a tokenizer whose tokens are bytes, whatever stands before them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes_of = tokenizer.token_bytes
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token: int) -> str:
        return self._decode(self._bytes_of(token))

    def finish(self) -> str:
        return self._decode(b"", True)


class WindowDetokenizer:
    """`Detokenizer` of any tokenizer.

    A token's text may depend on the one before it (a space that is dropped at the beginning only), so each
    piece is decoded together with the tokens of the one before.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._before: list[int] = []  # the tokens of the last piece
        self._pending: list[int] = []
        self._in_bytes = False  # the last token that has a text is a byte

    def push(self, token: int) -> str:
        self._pending.append(token)
        if self._tokenizer.has_text(token):
            self._in_bytes = self._tokenizer.is_byte_token(token)
        text = self._text()
        # A run of byte tokens is decoded as a whole, also across those without a text: one bad byte would
        # take back those before it.
        if not text or text.endswith(_REPLACEMENT) or self._in_bytes:
            return ""
        self._before, self._pending = self._pending, []
        return text

    def finish(self) -> str:
        text = self._text() if self._pending else ""
        self._before, self._pending = [], []
        return text

    def _text(self) -> str:
        before = self._tokenizer.decode(self._before)
        return self._tokenizer.decode(self._before + self._pending)[len(before) :]


class StopStrings:
    """Looks for stop strings in a text that arrives in pieces, and holds back what may become one."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str, *, look: bool = True) -> str:
        """The text that is safe to show. After `found` is set there is none. Without `look` everything is
        shown, and no later match begins inside it."""
        if not self._strings:
            return text
        if not look:
            self._held, text = "", self._held + text
            return text
        self._held += text
        # The one that was complete first; of several that end there, the longest.
        matches = [(at + len(s), at, s) for s in self._strings if (at := self._held.find(s)) >= 0]
        if matches:
            _, at, self.found = min(matches)
            shown, self._held = self._held[:at], ""
            return shown
        keep = max((_tail(self._held, string) for string in self._strings), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def finish(self) -> str:
        """What was held back and did not become a stop string."""
        text, self._held = self._held, ""
        return text


def _tail(text: str, string: str) -> int:
    """Length of the longest end of the text that begins the string without completing it."""
    longest = min(len(text), len(string) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(string[:n])), 0)
