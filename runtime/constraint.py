"""Constrained answers: which tokens may come next, by a grammar, over the `llguidance` library."""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ..errors import ExecutorError, MissingDependencyError, SettingError
from .sampling_params import SamplingParams
from .tokenizer import Tokenizer
from .tokenizer_files import one_line

# Between the parts of JSON a model may write as much as indentation takes, and not spaces without end.
JSON_OPTIONS = {"whitespace_pattern": r"[ \n\r\t]{1,40}", "json_allow_general_unicode_escapes": True}
# By default a text that has to come may come only in the tokens that the tokenizer makes of it. A model may
# write it in others, and then the same mask is right for the greedy choice and for any other.
ANY_TOKENS = '\n%llguidance {"no_forcing": true}\n'
MAX_GRAMMARS = 32


class Constraints:
    """The grammars of one model's requests; the last ones are kept. Safe to use from several threads.

    `llguidance` is imported, and the vocabulary put into its trie (a fraction of a second), when the first
    grammar is asked for.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = sorted(token for token in eos_token_ids if token < vocab_size)
        self._vocabulary: Any = None
        self._matchers: OrderedDict[tuple[str, str], Any] = OrderedDict()
        self._lock = threading.Lock()
        self._compiling = threading.Lock()  # held for long

    def start(self, params: SamplingParams) -> "Constraint | None":
        """The beginning of an answer that these settings constrain; None where they do not. Compiling a
        grammar takes milliseconds and more, where it is not kept. Raises `SettingError` for one that cannot
        be used, `MissingDependencyError` without `llguidance`."""
        if not params.constrained:
            return None
        name, text = _asked(params)
        if (constraint := self._kept(name, text)) is not None:
            return constraint
        with self._compiling:
            if (constraint := self._kept(name, text)) is not None:
                return constraint
            matcher = self._compile(name, text)
            with self._lock:
                self._matchers[name, text] = matcher
                if len(self._matchers) > MAX_GRAMMARS:
                    self._matchers.popitem(last=False)
            return Constraint(matcher.deep_copy(), self._vocab_size)

    def _kept(self, name: str, text: str) -> "Constraint | None":
        with self._lock:
            matcher = self._matchers.get((name, text))
            if matcher is None:
                return None
            self._matchers.move_to_end((name, text))
            return Constraint(matcher.deep_copy(), self._vocab_size)

    def _compile(self, name: str, text: str) -> Any:
        try:
            from llguidance import LLMatcher, LLTokenizer
        except ImportError as error:
            raise MissingDependencyError(
                f"{name} needs the package llguidance: pip install 'nybble[structured]'"
            ) from error
        if self._vocabulary is None:
            try:
                self._vocabulary = LLTokenizer(
                    self._tokenizer.to_json(), n_vocab=self._vocab_size, eos_token=self._eos or None
                )
            except ValueError as error:
                raise SettingError(f"{name} cannot be used with this tokenizer: {one_line(error)}") from error
        if name == "regex":
            lark = json.loads(LLMatcher.grammar_from_regex(text))["grammars"][0]["lark_grammar"]
        elif name == "grammar":
            lark = text
        else:
            lark = f"start: %json {text}"
        matcher = LLMatcher(self._vocabulary, LLMatcher.grammar_from_lark(lark + ANY_TOKENS), log_level=0)
        if matcher.is_error():
            reason = matcher.get_error()
            if name.startswith("json"):  # without the grammar around it
                reason = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(text)) or reason
            reason = re.split(r"\n *\d+ \| ", reason)[0]  # without the lines of the grammar around it
            raise SettingError(f"{name} cannot be used: {one_line(ValueError(reason))}")
        # What the first masks of a grammar need is computed once, here and not between steps.
        matcher.deep_copy().compute_bitmask()
        return matcher


class Constraint:
    """Where one answer is in its grammar. Stop tokens are none of its business: they are allowed where it is
    `accepting`, and not given to it."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._mask: NDArray[np.bool_] | None = None  # of this place

    @property
    def accepting(self) -> bool:
        """Whether the text so far is whole."""
        return bool(self._matcher.is_accepting())

    @property
    def complete(self) -> bool:
        """Whether nothing can follow."""
        return bool(self._matcher.is_stopped())

    def allows(self, token: int) -> bool:
        """Whether the token may follow: much cheaper than the whole mask."""
        return bool(self._matcher.validate_tokens([token]) == 1)

    def allowed(self) -> NDArray[np.bool_]:
        """Which tokens may follow: [vocab], not to be changed."""
        if self._mask is None:
            if self.complete:  # the library's own end token would be left
                self._mask = np.zeros(self._vocab_size, np.bool_)
            else:
                bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
                self._check()
                self._mask = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        return self._mask

    def count_allowed(self, tokens: Sequence[int]) -> int:
        """How many of the tokens, from the first on, may follow one another."""
        return int(self._matcher.validate_tokens(list(tokens)))

    def accept(self, token: int) -> None:
        """Goes on by one token that is allowed."""
        self._mask = None
        if not self._matcher.consume_token(token):
            self._check()

    def take_back(self, count: int) -> None:
        """Goes back by so many tokens."""
        if count:
            self._mask = None
            self._matcher.rollback(count)
            self._check()

    def copy(self) -> Self:
        other = type(self)(self._matcher.deep_copy(), self._vocab_size)
        other._mask = self._mask
        return other

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = one_line(ValueError(self._matcher.get_error()))
            raise ExecutorError(f"the answer's grammar cannot go on: {reason}")


def _asked(params: SamplingParams) -> tuple[str, str]:
    """The name of the setting that constrains the answer, and its value as text."""
    if params.regex is not None:
        return "regex", params.regex
    if params.grammar is not None:
        return "grammar", params.grammar
    if params.json_schema is None:
        return "json_object", json.dumps({"type": "object", "x-guidance": JSON_OPTIONS})
    try:
        schema = params.json_schema
        schema = json.loads(schema) if isinstance(schema, str) else schema
        options = JSON_OPTIONS | schema.get("x-guidance", {}) if isinstance(schema, Mapping) else {}
        text = json.dumps({**schema, "x-guidance": options} if options else schema)
    except (ValueError, TypeError, RecursionError) as error:
        raise SettingError(f"json_schema is not JSON: {one_line(error)}") from error
    if not isinstance(schema, Mapping):
        raise SettingError(f"json_schema is {text[:40]}; expected an object")
    return "json_schema", text
