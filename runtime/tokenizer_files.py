"""What a model's tokenizer files hold besides the tokenizer itself."""

import json
from collections.abc import Mapping
from typing import Any

from ..errors import ModelFormatError, UnsupportedModelError
from ..models.config_reader import shown_names

_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


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
        templates = [e for e in entry if isinstance(e, dict) and isinstance(e.get("name"), str)]
        named = {e["name"]: e.get("template") for e in templates}
    elif isinstance(entry, dict):
        named = entry
    template = named.get(name)
    if not isinstance(template, str):
        known = shown_names(named) or type(entry).__name__
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
        raise ModelFormatError(f"{name} is not JSON: {one_line(error)}") from error
    if not isinstance(content, dict):
        raise ModelFormatError(f"{name} holds a {type(content).__name__}; expected an object")
    return content


def special_tokens(files: Mapping[str, bytes]) -> dict[str, str]:
    """`bos_token` and the like, by name: what a chat template may mention."""
    settings = load_json(files, "special_tokens_map.json") | load_json(files, "tokenizer_config.json")
    tokens = {}
    for name in _TOKEN_NAMES:
        value = settings.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
    return tokens


def one_line(error: BaseException) -> str:
    """An exception's message as one line of bounded length."""
    return " ".join((str(error) or type(error).__name__).split())[:300]
