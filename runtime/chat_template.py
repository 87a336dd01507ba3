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

from ..errors import ModelFormatError, RequestError
from .chat_messages import Message, check_messages, plain
from .tokenizer_files import one_line

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
            raise ModelFormatError(f"chat template, line {error.lineno}: {one_line(error)}") from error

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
            raise ModelFormatError(f"the chat template tries something unsafe: {one_line(error)}") from error
        except RequestError:
            raise
        except RecursionError as error:
            raise RequestError("the chat template recurses without end") from error
        except Exception as error:  # whatever a template's expressions raise: it is the template's doing
            raise RequestError(f"the chat template refuses these messages: {one_line(error)}") from error
        return "".join(parts)


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
