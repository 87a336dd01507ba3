"""Chat templates: a conversation to text, as transformers renders it.

A template comes with the model and is not trusted: it runs in jinja2's immutable sandbox, sees plain data
only, and its output is bounded.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import ModelFormatError, RequestError, UnsupportedModelError

Message = Mapping[str, Any]

# A chat that fills a context of a million tokens is a few megabytes.
MAX_RENDERED_CHARACTERS = 16_000_000


class ChatTemplate:
    """One compiled template. `variables` are what it sees besides the conversation: `bos_token` and the like.

    Raises `ModelFormatError` when it is not a template.
    """

    def __init__(self, source: str, variables: Mapping[str, Any] | None = None) -> None:
        self.source = source
        self._variables = dict(variables or {})
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelFormatError(f"chat template, line {error.lineno}: {_line(error)}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The conversation as text; `variables` reach the template (`enable_thinking=False`).

        Raises `RequestError` for messages that are not dicts with a role, or that the template refuses.
        """
        inputs = {
            **self._variables,
            "documents": None,
            **variables,
            "messages": check_messages(messages),
            "tools": plain(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        parts, size = [], 0
        try:
            for part in self._template.generate(inputs):
                parts.append(part)
                size += len(part)
                if size > MAX_RENDERED_CHARACTERS:
                    raise RequestError(
                        f"the chat template wrote more than {MAX_RENDERED_CHARACTERS} characters"
                    )
        except SecurityError as error:
            raise ModelFormatError(f"the chat template tries something unsafe: {_line(error)}") from error
        except RequestError:
            raise
        except RecursionError as error:
            raise RequestError("the chat template recurses without end") from error
        except Exception as error:  # whatever a template's expressions raise: it is the template's doing
            raise RequestError(f"the chat template refuses these messages: {_line(error)}") from error
        return "".join(parts)


def find_template(files: Mapping[str, bytes], name: str = "default") -> str | None:
    """The template's source among a model's tokenizer files: `chat_template.jinja`, else the entry of
    `tokenizer_config.json`, which is a string or a list of named ones. None when the model has none."""
    if (raw := files.get("chat_template.jinja")) is not None:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ModelFormatError(f"chat_template.jinja is not UTF-8: {error}") from error
    entry = load_json(files, "tokenizer_config.json").get("chat_template")
    if entry is None or isinstance(entry, str):
        return entry
    named = {}
    if isinstance(entry, list):
        named = {e.get("name"): e.get("template") for e in entry if isinstance(e, dict)}
    elif isinstance(entry, dict):
        named = entry
    template = named.get(name)
    if not isinstance(template, str):
        known = ", ".join(str(key) for key in named) or type(entry).__name__
        raise UnsupportedModelError(
            f"tokenizer_config.json: chat_template has no template named {name!r}; found {known}"
        )
    return template


def load_json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """A JSON object among a model's files, empty when it is absent. Raises `ModelFormatError`."""
    if name not in files:
        return {}
    try:
        content = json.loads(files[name])
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"{name} is not JSON: {_line(error)}") from error
    if not isinstance(content, dict):
        raise ModelFormatError(f"{name} holds a {type(content).__name__}; expected an object")
    return content


def check_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as plain dicts, keys whose value is None left out. Raises `RequestError`."""
    if isinstance(messages, Mapping | str | bytes) or not isinstance(messages, Sequence):
        raise RequestError(
            f"messages is a {type(messages).__name__}; expected a list of dicts with role and content"
        )
    if not messages:
        raise RequestError("messages is empty; expected at least one message")
    checked = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"message {number} is a {type(message).__name__}; expected a dict")
        if not isinstance(message.get("role"), str):
            raise RequestError(f"message {number} has no role; expected user, assistant or system")
        checked.append({str(key): plain(value) for key, value in message.items() if value is not None})
    return checked


def plain(value: Any) -> Any:
    """JSON's own types, rebuilt, so that a template meets no object with methods of its own; anything else
    becomes its type's name."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return f"<{type(value).__name__}>"


class _Generation(Extension):
    """`{% generation %}` marks the assistant's tokens for training; the text inside is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment that transformers gives chat templates: whitespace control, loop controls, plain
    JSON."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _line(error: BaseException) -> str:
    """An exception's message as one line of bounded length."""
    return " ".join((str(error) or type(error).__name__).split())[:300]
