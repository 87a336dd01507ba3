"""Calibration text of several kinds."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from nybble.errors import CalibrationError, SettingError
from nybble.quant.calibration import load_calibration
from nybble.quant.mixture import TextShare, load_mixture, parse_shares
from nybble.quant.recipe import Recipe

RECIPE = Recipe(samples=10, seq_len=8)


def encode(text: str) -> list[int]:
    return list(text.encode())


def load(*names: str | Path, recipe: Recipe = RECIPE) -> tuple[np.ndarray, str, str]:
    asked: list[int] = []

    def own_text(tokens: int) -> str:
        asked.append(tokens)
        return "s" * tokens

    found = load_mixture(parse_shares(names), encode=encode, recipe=recipe, render=None, own_text=own_text)
    assert asked in ([], [int((found.token_ids == ord("s")).sum())])
    return found.token_ids, found.digest, found.origin


@pytest.fixture
def texts(tmp_path: Path) -> tuple[Path, Path]:
    for name, letter in (("a.txt", "a"), ("b.txt", "b")):
        (tmp_path / name).write_text(letter * 1000)
    return tmp_path / "a.txt", tmp_path / "b.txt"


def count(windows: np.ndarray) -> dict[str, int]:
    assert (windows == windows[:, :1]).all()
    return {chr(letter): int((windows[:, 0] == letter).sum()) for letter in np.unique(windows)}


def test_one_text_is_what_it_is_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("".join(chr(33 + i % 90) for i in range(997)))
    alone = load_calibration(path, encode=encode, recipe=RECIPE)
    windows, digest, origin = load(path)
    assert np.array_equal(windows, alone.token_ids)
    assert (digest, origin) == (alone.digest, "a.txt")
    assert np.array_equal(load("default")[0], load_calibration(None, encode=encode, recipe=RECIPE).token_ids)


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        (("", ""), {"a": 5, "b": 5}),
        (("=3", "=1"), {"a": 8, "b": 2}),  # 7.5 and 2.5: the first of equal remainders has what is over
        (("=0.7", "=0.3"), {"a": 7, "b": 3}),
        (("", "=1.5"), {"a": 4, "b": 6}),
    ],
)
def test_shares_of_two_texts(
    texts: tuple[Path, Path], shares: tuple[str, str], expected: dict[str, int]
) -> None:
    windows, digest, origin = load(*(f"{path}{share}" for path, share in zip(texts, shares, strict=True)))
    assert count(windows) == expected
    assert origin == "a.txt, b.txt"
    lines = "".join(f"{hashlib.sha256(x.encode() * 1000).hexdigest()} {n}\n" for x, n in expected.items())
    assert digest == hashlib.sha256(lines.encode()).hexdigest()


def test_the_models_own_text_is_asked_for_as_much_as_is_needed(texts: tuple[Path, Path]) -> None:
    assert count(load("self")[0]) == {"s": 10}
    assert count(load(*texts, "self=2")[0]) == {"a": 3, "b": 2, "s": 5}


def test_names_and_shares(texts: tuple[Path, Path], tmp_path: Path) -> None:
    odd = tmp_path / "a=0.5"
    odd.write_text("x" * 100)
    assert parse_shares([odd]) == (TextShare(str(odd)),)
    assert parse_shares([f"{odd}=2", "self"]) == (TextShare(str(odd), 2.0), TextShare("self"))
    for share in ("0", "-1", "nan", "inf", "half", ""):
        with pytest.raises(
            SettingError, match=rf"calibration is 'self={share}'; expected NAME or NAME=SHARE"
        ):
            parse_shares([f"self={share}"])
    with pytest.raises(CalibrationError, match=r"b\.txt: its share of 10 samples is none"):
        load(f"{texts[0]}=100", texts[1])
    with pytest.raises(CalibrationError, match=r"nothing\.txt: cannot be read"):
        load(tmp_path / "nothing.txt", "self")
