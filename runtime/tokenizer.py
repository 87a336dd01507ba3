"""`Tokenizer`: text to token ids and back, over the `tokenizers` library, with one promise: text from a
user never becomes a control token.

Control tokens are the special ones, and those that the chat template writes itself (`<think>`). A
conversation is rendered with every control token inside its messages marked, so that what the template put
there and what a user wrote can be told apart. Where the messages hold none, which is nearly always, the
text is encoded in one piece exactly as transformers does it; otherwise it is cut at the template's own
control tokens and the parts are encoded with no special token recognised.
"""

import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from ..errors import ModelFormatError, RequestError, UnsupportedModelError
from .byte_level import byte_level_bytes
from .chat_messages import Message, check_messages, plain
from .tokenizer_files import find_template, special_tokens

if TYPE_CHECKING:
    from .chat_template import ChatTemplate

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")
MAX_FILE_BYTES = 512 * 2**20
# Private-use characters: around a control token that a user wrote, and between a user's text and what it
# could join to become one. Those already in a text are removed.
_OPEN, _CLOSE, _BREAK = "\U0010fffb", "\U0010fffc", "\U0010fffd"
_MARKS = re.compile(f"[{_OPEN}{_CLOSE}{_BREAK}]")


class Tokenizer:
    """The tokenizer of one model. Safe to use from several threads.

    `files` maps file names to contents: `tokenizer.json`, and where there are any `tokenizer_config.json`,
    `chat_template.jinja` and `special_tokens_map.json`. Raises `ModelFormatError` for damaged ones; the chat
    template is compiled when it is first used, which raises it then.
    """

    def __init__(self, files: Mapping[str, bytes], now: datetime | None = None) -> None:
        """`now` is the time that a chat template sees; None is the clock's."""
        if "tokenizer.json" not in files:
            raise ModelFormatError("tokenizer.json is missing; a model needs it to turn text into tokens")
        self._files = dict(files)
        self._tokenizer = _parse(files["tokenizer.json"])
        # A file's own truncation and padding are settings of its training, not of this use.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._later: tokenizers.Tokenizer | None = None
        # `encode_special_tokens` is a switch on the shared object.
        self._lock = threading.Lock()
        self._special_tokens = special_tokens(files)
        self._template_source = source = find_template(files)
        self._template: ChatTemplate | None = None
        self._template_variables: dict[str, Any] = dict(self._special_tokens)
        if now is not None:
            self._template_variables["strftime_now"] = now.strftime
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._control = {
            token.content: token
            for token in added.values()
            if token.content and (token.special or (source is not None and token.content in source))
        }
        self._control_ids = {token.content: i for i, token in added.items() if token.content in self._control}
        byte_ids = (self._tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        self._byte_ids = frozenset(i for i in byte_ids if i is not None)
        self._control_pattern = _any_of(self._control)
        self._special_pattern = _any_of([text for text, token in self._control.items() if token.special])
        self._around = self._encode(self._tokenizer, "", True, recognise=False)
        self._is_byte_level = isinstance(self._tokenizer.decoder, tokenizers.decoders.ByteLevel)
        self._token_bytes: dict[int, bytes] = {}  # of those asked for so far

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer":
        """The tokenizer of a model's folder."""
        files = {}
        for name in FILES:
            path = Path(folder) / name
            if not path.is_file():
                continue
            if (size := path.stat().st_size) > MAX_FILE_BYTES:
                raise ModelFormatError(f"{name} has {size} bytes; expected at most {MAX_FILE_BYTES}")
            files[name] = path.read_bytes()
        return cls(files)

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id; the model's logits may be wider."""
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)

    @property
    def eos_token_id(self) -> int | None:
        """The token that `tokenizer_config.json` names as the end, which may not be the only one."""
        text = self._special_tokens.get("eos_token")
        return None if text is None else self._tokenizer.token_to_id(text)

    def has_tokens_of(self, other: "Tokenizer") -> bool:
        """Whether every token of the other is one here, with the same id."""
        own = self._tokenizer.get_vocab(with_added_tokens=True)
        theirs = other._tokenizer.get_vocab(with_added_tokens=True)
        return all(own.get(text) == i for text, i in theirs.items())

    @property
    def special_ids(self) -> frozenset[int]:
        return self._special_ids

    @property
    def has_chat_template(self) -> bool:
        return self._template_source is not None

    def to_json(self) -> str:
        """The `tokenizer.json` of what `encode` uses, for other libraries that read the format."""
        return self._tokenizer.to_str()

    def token_id(self, text: str) -> int | None:
        """The id of one token by its text in the vocabulary; None when there is none."""
        return self._tokenizer.token_to_id(text)

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of a text. `add_special_tokens` adds what the model wants around one (often a begin
        token). Special tokens written in the text are plain characters unless `parse_special`."""
        if not isinstance(text, str):
            raise RequestError(f"the text is a {type(text).__name__}; expected str")
        if parse_special:
            return self._encode(self._tokenizer, text, add_special_tokens, recognise=True)
        around = self._around if add_special_tokens else []
        ids = self._encode(self._tokenizer, text, add_special_tokens, recognise=False)
        if self._count_special(ids) == self._count_special(around):
            return ids
        # The vocabulary makes a special token from plain characters.
        before = next((n for n, pair in enumerate(zip(around, ids, strict=False)) if len(set(pair)) > 1), 0)
        return around[:before] + self._encode_plain(text, first=True) + around[before:]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids; bytes that are not UTF-8 become U+FFFD. Raises `RequestError` for an id
        that is not a number of the vocabulary's kind; ids without a token give no text."""
        return self._tokenizer.decode(self.check_ids(ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token: int) -> str:
        """One token as text, special ones too; what is only part of a character shows as U+FFFD."""
        return self._tokenizer.decode([token], skip_special_tokens=False)

    def has_text(self, token: int) -> bool:
        """Whether the token shows in a decoded text: special ones do not, nor ids of no token."""
        return token not in self._special_ids and self._tokenizer.id_to_token(token) is not None

    @property
    def is_byte_level(self) -> bool:
        """Whether a decoded text is its tokens' bytes one after the other, `token_bytes`."""
        return self._is_byte_level

    def token_bytes(self, token: int) -> bytes:
        """The token's part of a decoded text, of a tokenizer that `is_byte_level`; special tokens and ids
        without a token have none."""
        found = self._token_bytes.get(token)
        if found is None:
            text = None if token in self._special_ids else self._tokenizer.id_to_token(token)
            found = self._token_bytes[token] = b"" if text is None else byte_level_bytes(text)
        return found

    def is_byte_token(self, token: int) -> bool:
        """Whether the token is one byte of a byte-fallback vocabulary, `<0x0A>`."""
        return token in self._byte_ids

    @staticmethod
    def check_ids(ids: Sequence[int]) -> list[int]:
        """The ids as a list of plain integers, 0 to 2**31 - 1. Raises `RequestError`."""
        checked = []
        for token in ids:
            if isinstance(token, bool) or not hasattr(token, "__index__") or not 0 <= int(token) < 2**31:
                raise RequestError(f"{token!r} is not a token id; expected a number from 0")
            checked.append(int(token))
        return checked

    def render_chat(self, messages: Sequence[Message], **options: Any) -> str:
        """The conversation as text, through the model's template. To run it, use `encode_chat`: encoding
        this text cannot tell the template's control tokens from a user's."""
        return self._require_template().render(messages, **options)

    def encode_chat(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """Token ids of a conversation through the model's template; `options` are `ChatTemplate.render`'s.
        Control tokens are those the template wrote."""
        template = self._require_template()
        text = template.render(messages, **options)
        marked = template.render(
            [self._mark_message(m) for m in check_messages(messages)],
            **{name: self._mark(plain(value), self._control_pattern) for name, value in options.items()},
        )
        genuine = [m for m in self._control_pattern.finditer(marked) if not _is_marked(marked, m)]
        found = [m.group() for m in self._control_pattern.finditer(text)]
        if found == [m.group() for m in genuine] and _MARKS.sub("", marked) == text:
            ids = self._encode(self._tokenizer, text, False, recognise=True)
            # More would come from a normalizer that makes one of other characters.
            if self._count_special(ids) == sum(self._control[content].special for content in found):
                return ids
        return self._encode_marked(marked, genuine)

    def _encode_marked(self, marked: str, genuine: list[re.Match[str]]) -> list[int]:
        ids: list[int] = []
        end, strip_left = 0, False
        for match in [*genuine, None]:
            piece = marked[end : match.start() if match else len(marked)]
            token = self._control[match.group()] if match else None
            if strip_left:
                piece = piece.lstrip()
            if token is not None and token.lstrip:
                piece = piece.rstrip()
            ids += self._encode_plain(piece, first=end == 0)
            if match is not None and token is not None:
                ids.append(self._control_ids[match.group()])
                end, strip_left = match.end(), token.rstrip
        return ids

    def _encode_plain(self, piece: str, *, first: bool) -> list[int]:
        """A part of a text that holds no control token of the template's, as plain characters. `first`: it
        begins the text, where some tokenizers add a space."""
        ids: list[int] = []
        control_ids = set(self._control_ids.values())
        for text in _MARKS.split(piece):
            if not text:
                continue
            tokenizer = self._tokenizer if first and not ids else self._later_tokenizer()
            part = self._encode(tokenizer, text, False, recognise=False)
            if not control_ids.isdisjoint(part):
                # The vocabulary makes the token from plain characters: encode those one by one.
                part = [i for c in text for i in self._encode(tokenizer, c, False, recognise=False)]
            if not control_ids.isdisjoint(part):
                raise RequestError("the text holds a character that is a control token by itself")
            ids += part
        return ids

    def _encode(
        self, tokenizer: tokenizers.Tokenizer, text: str, add_special_tokens: bool, *, recognise: bool
    ) -> list[int]:
        with self._lock:
            tokenizer.encode_special_tokens = not recognise
            try:
                return list(tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
            except Exception as error:  # the library raises Exception itself
                raise RequestError(f"the tokenizer cannot encode the text: {error}") from error

    def _later_tokenizer(self) -> tokenizers.Tokenizer:
        """A tokenizer for a part from inside a text. SentencePiece's Metaspace may add its space only at the
        beginning of the whole text, which a part encoded by itself would look like."""
        raw = self._files["tokenizer.json"]
        if b'"first"' not in raw:
            return self._tokenizer
        with self._lock:
            if self._later is None:
                self._later = _parse(re.sub(rb'("prepend_scheme"\s*:\s*)"first"', rb'\1"never"', raw))
        return self._later

    def _mark_message(self, message: Message) -> dict[str, Any]:
        """A message with the control tokens in its texts marked. The model's own answers may hold those
        that are not special: they are how it wrote its thoughts and tool calls."""
        pattern = self._special_pattern if message["role"] == "assistant" else self._control_pattern
        role = self._special_pattern.sub("", message["role"])
        return {name: self._mark(value, pattern) for name, value in message.items()} | {"role": role}

    def _mark(self, value: Any, pattern: re.Pattern[str]) -> Any:
        """The value with what the pattern finds in its texts marked, recursively. Where a text begins or ends
        with part of a control token, a mark keeps the template's text beside it from completing one."""
        if isinstance(value, dict):
            return {k: v if k == "type" else self._mark(v, pattern) for k, v in value.items()}
        if isinstance(value, list):
            return [self._mark(item, pattern) for item in value]
        if not isinstance(value, str):
            return value
        text = _MARKS.sub("", value)
        marked = pattern.sub(lambda m: f"{_OPEN}{m.group()}{_CLOSE}", text)
        if any(text.startswith(c[-n:]) for c in self._control for n in range(1, len(c))):
            marked = _BREAK + marked
        if any(text.endswith(c[:n]) for c in self._control for n in range(1, len(c))):
            marked += _BREAK
        return marked

    def _count_special(self, ids: Sequence[int]) -> int:
        return sum(i in self._special_ids for i in ids)

    def _require_template(self) -> "ChatTemplate":
        if self._template_source is None:
            raise UnsupportedModelError(
                "the model has no chat template; give a plain prompt, or add a chat_template.jinja"
            )
        if self._template is None:  # importing jinja2 and compiling take a sixth of a start
            from .chat_template import ChatTemplate

            self._template = ChatTemplate(self._template_source, self._template_variables)
        return self._template


def _parse(raw: bytes) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(raw.decode())  # an eighth faster than `from_buffer`
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises Exception, and panics are not even that
        reason = " ".join(str(error).split())[:200]
        raise ModelFormatError(f"tokenizer.json cannot be read: {reason}") from error


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds the leftmost, then longest, of the texts."""
    longest_first = sorted(texts, key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _is_marked(text: str, match: re.Match[str]) -> bool:
    return text[match.start() - 1 : match.start()] == _OPEN and text.startswith(_CLOSE, match.end())
