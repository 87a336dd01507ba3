"""Questions with choices, answered by which choice is most likely."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .errors import CalibrationError
from .logit_sources import RuntimeLogits
from .records import dataclass
from .runtime.sampler import log_softmax
from .runtime.tokenizer import Tokenizer

MAX_FILE_BYTES = 256 << 20


@dataclass(frozen=True)
class Question:
    where: str  # the file and line it is from
    text: str
    choices: tuple[str, ...]
    answer: int  # the right choice


@dataclass(frozen=True)
class Accuracy:
    """The share of questions whose right choice was the most likely, and its standard error. Likely by the
    sum of its tokens' log-probabilities, or by that divided by the bytes of the choice, `by_length`."""

    questions: int
    accuracy: float
    accuracy_by_length: float

    @property
    def error(self) -> float:
        return standard_error(self.accuracy, self.questions)

    @property
    def error_by_length(self) -> float:
        return standard_error(self.accuracy_by_length, self.questions)


def standard_error(share: float, count: int) -> float:
    """Of a share of `count` questions; 0 of a single one."""
    return math.sqrt(share * (1 - share) / (count - 1)) if count > 1 else 0.0


def read_questions(path: Path) -> list[Question]:
    """The lines of a JSONL file: `{"question": ..., "choices": [...], "answer": 0}`. Raises
    `CalibrationError` naming the line."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise CalibrationError(
                f"{path}: has {path.stat().st_size} bytes; expected at most {MAX_FILE_BYTES}"
            )
        lines = path.read_text("utf-8-sig").split("\n")
    except OSError as error:
        raise CalibrationError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise CalibrationError(f"{path}: byte {error.start} is not UTF-8; expected UTF-8 text") from None
    found = [_question(f"{path}: line {n}", line) for n, line in enumerate(lines, start=1) if line.strip()]
    if not found:
        raise CalibrationError(f"{path}: holds no questions; expected one JSON object per line")
    return found


def _question(where: str, line: str) -> Question:
    try:
        record: Any = json.loads(line)
    except (json.JSONDecodeError, RecursionError):
        raise CalibrationError(f"{where}: is not JSON; expected one object per line") from None
    if not isinstance(record, dict):
        raise CalibrationError(f"{where}: expected an object with question, choices and answer")
    text, choices, answer = (record.get(name) for name in ("question", "choices", "answer"))
    if not isinstance(text, str) or not text.strip():
        raise CalibrationError(f"{where}: question is {text!r}; expected a text")
    if (
        not isinstance(choices, list)
        or len(choices) < 2
        or not all(isinstance(choice, str) and choice.strip() for choice in choices)
    ):
        raise CalibrationError(f"{where}: choices is {choices!r}; expected a list of at least two texts")
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(choices):
        raise CalibrationError(
            f"{where}: answer is {answer!r}; expected the right choice's number, 0 to {len(choices) - 1}"
        )
    return Question(where, text, tuple(choices), answer)


def tokens_of(question: Question, choice: str, tokenizer: Tokenizer) -> tuple[list[int], int]:
    """Token ids of the question with a choice behind it, a space between them, and where the choice's own
    begin: at the first that the question alone does not have."""
    between = "" if question.text[-1].isspace() or choice[0].isspace() else " "
    alone, whole = tokenizer.encode(question.text), tokenizer.encode(question.text + between + choice)
    begin = next((i for i, (a, b) in enumerate(zip(alone, whole, strict=False)) if a != b), len(alone))
    return whole, max(1, min(begin, len(whole) - 1))


def longest(questions: Sequence[Question], tokenizer: Tokenizer) -> tuple[int, str]:
    """Tokens of the longest question with one of its choices, and where it is from."""
    return max(
        (len(tokens_of(question, choice, tokenizer)[0]), question.where)
        for question in questions
        for choice in question.choices
    )


def log_likelihood(model: RuntimeLogits, ids: list[int], begin: int) -> float:
    """The log-probability of the tokens from `begin` on, given those before."""
    window, total = np.array([ids], np.int32), 0.0
    for start in range(0, len(ids) - 1, model.chunk):
        end = min(start + model.chunk, len(ids) - 1)
        logits = model.rows(window, 0, start, end)
        for row in range(max(start, begin - 1), end):
            total += float(log_softmax(logits[row - start])[ids[row + 1]])
    return total


def right_choices(model: RuntimeLogits, question: Question) -> tuple[bool, bool]:
    """Whether the right choice is the most likely one, and whether it is by length; of equal ones the first
    counts."""
    values = [
        log_likelihood(model, *tokens_of(question, choice, model.tokenizer)) for choice in question.choices
    ]
    by_length = [value / len(c.encode()) for value, c in zip(values, question.choices, strict=True)]
    best, best_by_length = (each.index(max(each)) for each in (values, by_length))
    return best == question.answer, best_by_length == question.answer
