"""The text that calibration and evaluation run on."""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CalibrationError
from ..records import dataclass
from .recipe import Recipe

Encode = Callable[[str], Sequence[int]]
Render = Callable[[list[dict[str, Any]]], str]

DEFAULT_ORIGIN = "pydoc_data.topics"


@dataclass(frozen=True, eq=False)
class Calibration:
    """Windows of calibration text, [samples, seq_len] int32 token ids, and the SHA-256 of the whole text."""

    token_ids: NDArray[np.int32]
    digest: str
    origin: str  # the file's name, or where the default text comes from


def load_calibration(
    path: Path | None, *, encode: Encode, recipe: Recipe, render: Render | None = None
) -> Calibration:
    """The recipe's `samples` windows of `seq_len` tokens from a text.

    `path` is a file of UTF-8 text, or one named `.jsonl` whose lines are objects with `text` or `messages`
    (which `render` turns into text, as the model's chat template does); None is CPython's own documentation.
    `encode` gives a text's token ids without adding special ones. The windows follow one another without
    overlap; where the text holds more than needed, the recipe's seed chooses. Raises `CalibrationError` for
    a file that cannot be read, is not UTF-8 or not JSONL, and for a text that is too short.
    """
    text = default_text() if path is None else read_text(path, render)
    return of_text(
        text, recipe.samples, DEFAULT_ORIGIN if path is None else path.name, encode=encode, recipe=recipe
    )


def of_text(text: str, samples: int, origin: str, *, encode: Encode, recipe: Recipe) -> Calibration:
    """`samples` windows of the recipe's length, chosen by its seed. Raises `CalibrationError` for a text that
    is too short."""
    tokens = np.asarray(encode(text), np.int32)
    needed, found = samples * recipe.seq_len, len(tokens)
    if found < needed:
        raise CalibrationError(
            f"{origin}: holds {found} tokens; {samples} samples of {recipe.seq_len} need {needed}: "
            "give a longer text or lower --samples or --seq-len"
        )
    windows = tokens[: found // recipe.seq_len * recipe.seq_len].reshape(-1, recipe.seq_len)
    random = np.random.Generator(np.random.PCG64(recipe.seed))
    chosen = np.sort(random.choice(len(windows), samples, replace=False))
    return Calibration(windows[chosen], hashlib.sha256(text.encode()).hexdigest(), origin)


def default_text() -> str:
    """The even-numbered entries of `pydoc_data.topics` by name. They differ between Python versions."""
    return _topics(0)


def evaluation_text() -> str:
    """The odd-numbered entries, which calibration never sees."""
    return _topics(1)


def _topics(first: int) -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)[first::2])


def read_text(path: Path, render: Render | None) -> str:
    """The text of a file; the records of a JSONL file are joined with blank lines."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CalibrationError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        text = data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise CalibrationError(f"{path}: byte {error.start} is not UTF-8; expected UTF-8 text") from None
    if path.suffix.lower() != ".jsonl":
        return text
    lines = enumerate(text.split("\n"), start=1)
    return "\n\n".join(_record(f"{path}: line {n}", line, render) for n, line in lines if line.strip())


def _record(where: str, line: str, render: Render | None) -> str:
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply"
        raise CalibrationError(f"{where}: is not JSON ({reason}); expected one object per line") from None
    if isinstance(record, dict):
        if isinstance(record.get("text"), str):
            return str(record["text"])
        messages = record.get("messages")
        if isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages):
            if render is None:
                raise CalibrationError(
                    f"{where}: holds messages, but the model has no chat template; use text"
                )
            return render(messages)
    raise CalibrationError(f'{where}: expected an object with "text" (a string) or "messages" (a list)')
