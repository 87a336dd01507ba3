"""A conversation as a list of messages: what it must be, and plain copies of what it holds."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import RequestError

Message = Mapping[str, Any]


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
