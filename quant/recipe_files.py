"""Recipes as TOML files: those that come with Nybble by name, others by path.

A file holds `Recipe`'s settings; what it leaves out has `Recipe`'s default. docs/quantization.md says what
each named recipe costs and gives.
"""

import tomllib
from importlib.resources import files
from pathlib import Path

from ..errors import SettingError
from .recipe import Recipe

DEFAULT = "balanced"
_LARGEST_FILE = 64 * 1024


def recipe_names() -> list[str]:
    """The names of the recipes that come with Nybble, sorted."""
    folder = files(__package__).joinpath("recipes")
    return sorted(x.name.removesuffix(".toml") for x in folder.iterdir() if x.name.endswith(".toml"))


def load_recipe(name_or_path: str = DEFAULT) -> Recipe:
    """The recipe of that name, or the one in a TOML file. Text that ends in `.toml` or holds a path separator
    is a file. Raises `SettingError` naming it."""
    if name_or_path.endswith(".toml") or "/" in name_or_path or "\\" in name_or_path:
        return _parse(_read(Path(name_or_path)), name_or_path)
    names = recipe_names()
    if name_or_path not in names:
        raise SettingError(
            f"recipe {name_or_path!r} is unknown; expected {', '.join(names)}, or a path to a .toml file"
        )
    return _parse(files(__package__).joinpath("recipes", f"{name_or_path}.toml").read_bytes(), name_or_path)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST_FILE + 1)
    except OSError as error:
        raise SettingError(f"recipe {path}: can't be read: {error.strerror}") from None
    if len(data) > _LARGEST_FILE:
        raise SettingError(f"recipe {path}: longer than {_LARGEST_FILE} bytes, so it isn't a recipe")
    return data


def _parse(data: bytes, where: str) -> Recipe:
    try:
        settings = tomllib.loads(data.decode())
    except UnicodeDecodeError as error:
        raise SettingError(f"recipe {where}: not UTF-8 at byte {error.start}") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise SettingError(f"recipe {where}: not TOML: {error}".replace("\n", " ")) from None
    try:
        return Recipe.from_json(settings)
    except SettingError as error:
        raise SettingError(f"recipe {where}: {error}") from None
