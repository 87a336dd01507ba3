"""Calibration text of several kinds: files, the default one, and what the model itself says."""

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ..errors import CalibrationError, SettingError
from ..records import dataclass
from .calibration import (
    DEFAULT_ORIGIN,
    Calibration,
    Encode,
    Render,
    default_text,
    of_text,
    read_text,
)
from .recipe import Recipe

DEFAULT, OWN = "default", "self"
# Text in the model's own words, of at least so many tokens.
OwnText = Callable[[int], str]


@dataclass(frozen=True)
class TextShare:
    """A calibration text: `DEFAULT`, `OWN` or a file; and its share of the windows, in any unit."""

    name: str
    share: float = 1.0


def parse_shares(names: Sequence[str | Path]) -> tuple[TextShare, ...]:
    """Texts as a user names them: NAME, or NAME=SHARE where no file of that whole name is there. Raises
    `SettingError` for a share that is no positive number."""
    return tuple(_parse(str(name)) for name in names)


def _parse(text: str) -> TextShare:
    name, equals, share = text.rpartition("=")
    if not equals or not name or os.path.exists(text):
        return TextShare(text)
    try:
        value = float(share)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise SettingError(f"calibration is {text!r}; expected NAME or NAME=SHARE with a positive number")
    return TextShare(name, value)


def load_mixture(
    texts: Sequence[TextShare], *, encode: Encode, recipe: Recipe, render: Render | None, own_text: OwnText
) -> Calibration:
    """The recipe's windows out of several texts, each as `load_calibration` would choose them, one text after
    another; their shares are rounded to whole windows. `own_text` is asked where a text is the model's own.

    The digest of several texts is that of a line for each: its own digest and how many windows it gave.
    Raises `CalibrationError` as `load_calibration` does, and for a text whose share is no window.
    """
    counts = _counts(texts, recipe.samples)
    found = []
    for text, count in zip(texts, counts, strict=True):
        if text.name == OWN:
            content, origin = own_text(count * recipe.seq_len), OWN
        elif text.name == DEFAULT:
            content, origin = default_text(), DEFAULT_ORIGIN
        else:
            content, origin = read_text(Path(text.name), render), Path(text.name).name
        found.append(of_text(content, count, origin, encode=encode, recipe=recipe))
    if len(found) == 1:
        return found[0]
    lines = "".join(f"{part.digest} {count}\n" for part, count in zip(found, counts, strict=True))
    return Calibration(
        np.concatenate([part.token_ids for part in found]),
        hashlib.sha256(lines.encode()).hexdigest(),
        ", ".join(part.origin for part in found),
    )


def _counts(texts: Sequence[TextShare], samples: int) -> list[int]:
    """Windows of each text: what is over after rounding down goes to the largest remainders."""
    total = sum(text.share for text in texts)
    exact = [samples * text.share / total for text in texts]
    counts = [int(count) for count in exact]
    by_remainder = sorted(range(len(texts)), key=lambda i: (counts[i] - exact[i], i))
    for i in by_remainder[: samples - sum(counts)]:
        counts[i] += 1
    for text, count in zip(texts, counts, strict=True):
        if count == 0:
            raise CalibrationError(
                f"{text.name}: its share of {samples} samples is none; give it more, or raise --samples"
            )
    return counts
