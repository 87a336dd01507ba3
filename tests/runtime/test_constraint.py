"""Constrained answers are what was asked for, and the model's own where it would have said that anyway."""

import json
import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from nybble.errors import MissingDependencyError, SettingError
from nybble.runtime.constraint import Constraints
from nybble.runtime.engine import Engine
from nybble.runtime.sampling_params import ResolvedSampling, SamplingParams
from nybble.runtime.sequence import Request
from nybble.runtime.token_chooser import TokenChooser
from nybble.runtime.tokenizer import Tokenizer

pytest.importorskip("llguidance")
KINDS = ("byte_level", "metaspace", "prepend")
LOGITS = 1000  # more than the vocabulary has, as models do


@pytest.fixture(scope="session")
def grammars(tokenizer_json: dict[str, bytes]) -> dict[str, tuple[Tokenizer, Constraints]]:
    """Of each kind of tokenizer; `</s>` is the model's end token."""
    found = {}
    for kind, raw in tokenizer_json.items():
        tokenizer = Tokenizer({"tokenizer.json": raw})
        found[kind] = tokenizer, Constraints(tokenizer, LOGITS, [tokenizer.token_id("</s>") or 0])
    return found


def random_answer(
    tokenizer: Tokenizer,
    constraints: Constraints,
    params: SamplingParams,
    seed: int,
    most: int = 1500,
    min_tokens: int = 0,
) -> tuple[str, list[int], bool]:
    """What a model says whose every row is random: text, tokens, and whether it came to its end."""
    end = tokenizer.token_id("</s>") or 0
    chooser = TokenChooser(
        params.resolve({}),
        vocab_size=LOGITS,
        seed=seed,
        stop_ids=[end],
        min_tokens=min_tokens,
        constraint=constraints.start(params),
    )
    rng, tokens = np.random.default_rng(seed), []
    while len(tokens) < most:
        token = chooser.choose(rng.normal(0, 3, LOGITS).astype(np.float32), len(tokens))
        chooser.accept(token)
        tokens.append(token)
        if token == end:
            return tokenizer.decode(tokens), tokens, True
    return tokenizer.decode(tokens), tokens, False


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.sampled_from(["a", "b c", "ü", 'q"'])
    return st.dictionaries(names, inner, min_size=1, max_size=3).map(
        lambda parts: {
            "type": "object",
            "properties": parts,
            "required": sorted(parts)[:2],
            "additionalProperties": False,
        }
    )


SCHEMAS = st.recursive(
    st.one_of(
        st.just({"type": "boolean"}),
        st.just({"type": "null"}),
        st.just({"const": "x\ny"}),
        st.just({"type": "number", "minimum": -2, "maximum": 2}),
        st.lists(st.sampled_from(["red", "grün", 3, None, True]), min_size=1, max_size=3).map(
            lambda values: {"enum": values}
        ),
        st.integers(-50, 50).map(lambda low: {"type": "integer", "minimum": low, "maximum": low + 20}),
        st.integers(0, 6).map(lambda most: {"type": "string", "maxLength": most}),
    ),
    lambda inner: st.one_of(
        inner.map(lambda item: {"type": "array", "items": item, "maxItems": 2}),
        objects(inner),
        st.lists(inner, min_size=1, max_size=2).map(lambda choices: {"anyOf": choices}),
    ),
    max_leaves=4,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    schema=SCHEMAS,
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 99),
    temperature=st.sampled_from([0.0, 1.0]),
)
def test_json_answers_validate(
    grammars: Any, schema: dict[str, Any], kind: str, seed: int, temperature: float
) -> None:
    import jsonschema

    params = SamplingParams(json_schema=schema, temperature=temperature)
    text, _, ended = random_answer(*grammars[kind], params, seed)
    assert ended
    jsonschema.validate(json.loads(text), schema)


PATTERNS = (
    r"[0-9]{4}-[0-9]{2}",
    r"(yes|no|möglich)",
    r"(a|bc){0,9}d?",
    r"[^\n]{3,9}\.",
    r"(?:[A-Z][a-z]{1,6} ){1,3}end",
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pattern=st.sampled_from(PATTERNS),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 99),
    temperature=st.sampled_from([0.0, 1.0]),
    min_tokens=st.sampled_from([0, 5, 40]),
)
def test_regular_expressions_match(
    grammars: Any, pattern: str, kind: str, seed: int, temperature: float, min_tokens: int
) -> None:
    tokenizer, constraints = grammars[kind]
    params = SamplingParams(regex=pattern, temperature=temperature)
    text, tokens, ended = random_answer(tokenizer, constraints, params, seed, 400, min_tokens)
    # A decoded text has lost a space at its beginning where the vocabulary's words begin with one.
    assume(kind == "byte_level" or not tokenizer.token_text(tokens[0]).startswith(" "))
    assert ended
    assert re.fullmatch(pattern, text)
    if len(tokens) <= min_tokens:  # then nothing could follow
        constraint = constraints.start(params)
        for token in tokens[:-1]:
            constraint.accept(token)
        assert constraint.complete or not constraint.allowed().any()


def test_a_lark_grammar(grammars: Any) -> None:
    grammar = 'start: "(" start ")" | NUMBER\nNUMBER: /[0-9]{1,3}/'
    for seed in range(5):
        text, _, ended = random_answer(
            *grammars["byte_level"], SamplingParams(grammar=grammar, temperature=1), seed
        )
        assert not ended or re.fullmatch(r"(\(*)[0-9]{1,3}(\)*)", text)
        assert text.count("(") == text.count(")") or not ended
        assert text[0] in "(0123456789"


def test_any_json_object(grammars: Any) -> None:
    params = SamplingParams(json_object=True, temperature=0.5)
    ended = 0
    for seed in range(12):
        text, _, whole = random_answer(*grammars["byte_level"], params, seed, most=300)
        assert text.startswith("{")
        if whole:
            assert isinstance(json.loads(text), dict)
            ended += 1
    assert ended > 3


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=st.sampled_from(KINDS), seed=st.integers(0, 999), pattern=st.sampled_from(PATTERNS))
def test_a_token_may_follow_where_the_mask_has_it(grammars: Any, kind: str, seed: int, pattern: str) -> None:
    """The greedy choice asks about one token, any other for the whole mask."""
    _, constraints = grammars[kind]
    constraint = constraints.start(SamplingParams(regex=pattern))
    rng = np.random.default_rng(seed)
    for _ in range(6):
        mask = constraint.allowed()
        assert [constraint.allows(token) for token in range(LOGITS)] == mask.tolist()
        if not mask.any():
            break
        constraint.accept(int(rng.choice(np.flatnonzero(mask))))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=st.sampled_from(KINDS), seed=st.integers(0, 999), back=st.integers(0, 8))
def test_taking_tokens_back_leaves_no_trace(grammars: Any, kind: str, seed: int, back: int) -> None:
    tokenizer, constraints = grammars[kind]
    end = tokenizer.token_id("</s>") or 0
    params = SamplingParams(regex="[a-z]{2,6}( [0-9]+)*!?")
    sampling = ResolvedSampling(1.0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5)

    def chooser() -> TokenChooser:
        return TokenChooser(
            sampling, vocab_size=LOGITS, seed=seed, stop_ids=[end], min_tokens=4,
            constraint=constraints.start(params),
        )  # fmt: skip

    rows = np.random.default_rng(seed).normal(0, 2, (12, LOGITS)).astype(np.float32)
    straight, answer = chooser(), []
    for position, row in enumerate(rows):
        answer.append(straight.choose(row, position))
        if answer[-1] == end:
            break
        straight.accept(answer[-1])
    there_and_back, again = chooser(), []
    for position, row in enumerate(rows[: len(answer)]):
        tried: list[int] = []
        for further in rows[position : position + back]:
            token = there_and_back.choose(further, position + 100)
            tried.append(token)
            there_and_back.accept(token)
            if token == end:
                break
        there_and_back.take_back(tried)
        again.append(there_and_back.choose(row, position))
        there_and_back.accept(again[-1])
    assert again == answer


def test_forks_are_apart(grammars: Any) -> None:
    _, constraints = grammars["byte_level"]
    one = constraints.start(SamplingParams(regex="ab|cd"))
    tokenizer = grammars["byte_level"][0]
    a, c = tokenizer.token_id("a"), tokenizer.token_id("c")
    other = one.copy()
    one.accept(a)
    assert other.allows(c)
    assert not one.allows(c)
    assert one.count_allowed([tokenizer.token_id("b"), a]) == 1


@pytest.fixture
def engine(make_executor: Callable[..., Any], byte_tokenizer: Tokenizer) -> Callable[..., Engine]:
    def make(seed: int, eos: tuple[int, ...] = (0,)) -> Engine:
        executor = make_executor(seed=seed)
        return Engine(executor, byte_tokenizer, max_model_len=200, eos_token_ids=eos)

    return make


def ask(engine: Engine, **params: Any) -> Any:
    sequence = engine.add(Request("a", (5, 9, 33), SamplingParams(**params)))
    while engine.has_work:
        engine.step()
    if sequence.error is not None:
        raise sequence.error
    return sequence.output()


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10_000))
def test_an_answer_that_fits_anyway_is_not_changed(engine: Any, byte_tokenizer: Tokenizer, seed: int) -> None:
    free = ask(engine(seed), max_tokens=14)
    # A text, not parts of characters or ids that no token has.
    assume("\ufffd" not in free.text and max(free.token_ids) < byte_tokenizer.vocab_size)
    rest = "" if free.finish_reason == "stop" else "[a-zA-Z .,]*"
    bound = ask(engine(seed), max_tokens=14, regex=f"({re.escape(free.text)}{rest}|[0-9]+)")
    assert bound.token_ids == free.token_ids
    assert bound.finish_reason == free.finish_reason


def test_answers_end_where_nothing_can_follow(engine: Any) -> None:
    for eos, tail in (((0,), (0,)), ((), ())):
        output = ask(engine(3, eos), regex="[a-z]{5}", max_tokens=20, min_tokens=12)
        assert re.fullmatch("[a-z]{5}", output.text)
        assert output.finish_reason == "stop"
        assert output.token_ids[5:] == tail


def test_a_stop_token_that_is_text_ends_only_what_is_whole(engine: Any, byte_tokenizer: Tokenizer) -> None:
    for seed in range(20):
        stop = byte_tokenizer.token_id("a")
        output = ask(
            engine(seed, ()), regex="(aa|b){3}c?", stop_token_ids=[stop], temperature=2.0, seed=seed,
            max_tokens=9,
        )  # fmt: skip
        assert output.finish_reason == "stop"
        assert re.fullmatch("b{3}c?", output.text)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"json_schema": {"type": "strin"}}, "json_schema cannot be used: Invalid type: strin"),
        ({"json_schema": {"not": {"type": "string"}}}, "json_schema cannot be used: Unimplemented keys"),
        ({"json_schema": '{"type": '}, "json_schema is not JSON: Expecting value"),
        ({"json_schema": "[1]"}, r"json_schema is \[1\]; expected an object"),
        ({"json_schema": {"const": object()}}, "json_schema is not JSON: Object of type object"),
        ({"regex": "(abc"}, "regex cannot be used: .*unclosed group"),
        ({"grammar": "start: foo"}, "grammar cannot be used: .*unknown name"),
    ],
)
def test_what_cannot_be_used_is_named_in_one_line(engine: Any, params: dict[str, Any], message: str) -> None:
    there = engine(0)
    with pytest.raises(SettingError, match=message) as caught:
        there.add(Request("a", (5,), SamplingParams(**params)))
    assert "\n" not in str(caught.value)
    assert not there.has_work


def test_without_the_library_one_line_says_what_installs_it(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    there = engine(0)
    assert ask(there, max_tokens=2).finish_reason == "length"
    with pytest.raises(MissingDependencyError, match=r"regex needs .* pip install 'nybble\[structured\]'"):
        there.add(Request("b", (5,), SamplingParams(regex="a")))


def test_what_is_prepared_is_there(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """From several threads at once, each grammar is compiled once; adding a request compiles none."""
    there = engine(3)
    compiled: list[str] = []
    compile_one = Constraints._compile

    def counted(self: Constraints, name: str, text: str) -> Any:
        compiled.append(text)
        return compile_one(self, name, text)

    monkeypatch.setattr(Constraints, "_compile", counted)
    patterns = ["[a-c]{3}", "[x-z]{2}"]
    with ThreadPoolExecutor(6) as pool:
        for _ in pool.map(lambda i: there.prepare(SamplingParams(regex=patterns[i % 2])), range(12)):
            pass
    there.prepare(SamplingParams())
    assert sorted(compiled) == patterns
    assert re.fullmatch(patterns[1], ask(there, regex=patterns[1], max_tokens=9).text)
    assert sorted(compiled) == patterns
    for number in range(40):
        there.prepare(SamplingParams(regex=f"a{number}"))
    there.prepare(SamplingParams(regex=patterns[0]))
    assert compiled.count(patterns[0]) == 2  # only the last ones are kept
    with pytest.raises(SettingError, match="regex cannot be used"):
        there.prepare(SamplingParams(regex="("))
