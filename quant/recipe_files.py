"""Recipes as TOML files: those that come with Nybble by name, others by path.

A file holds `Recipe`'s settings; what it leaves out has `Recipe`'s default. docs/quantization.md says what
each named recipe costs and gives.
"""

from importlib.resources import files
from importlib.resources.abc import Traversable

from ..errors import SettingError
from ..models.toml_files import parse_toml, read_toml, toml_names, toml_path
from .recipe import Recipe

DEFAULT = "balanced"


def recipe_names() -> list[str]:
    """The names of the recipes that come with Nybble, sorted."""
    return toml_names(_folder())


def load_recipe(name_or_path: str = DEFAULT) -> Recipe:
    """The recipe of that name, or the one in a TOML file. Text that ends in `.toml` or holds a path separator
    is a file. Raises `SettingError` naming it."""
    where = f"recipe {name_or_path}"
    if (path := toml_path(name_or_path)) is not None:
        text = read_toml(path, where)
    elif name_or_path in (names := recipe_names()):
        text = _folder().joinpath(f"{name_or_path}.toml").read_text(encoding="utf-8")
    else:
        raise SettingError(
            f"recipe {name_or_path!r} is unknown; expected {', '.join(names)}, or a path to a .toml file"
        )
    settings = parse_toml(text, where)
    chosen = sorted(settings.keys() & {"bits", "group_size", "layer_formats"})
    if settings.get("average_bits") and chosen:
        raise SettingError(
            f"{where}: {' and '.join(chosen)} stand beside average_bits, which chooses formats"
        )
    try:
        return Recipe.from_json(settings)
    except SettingError as error:
        raise SettingError(f"{where}: {error}") from None


def _folder() -> Traversable:
    return files(__package__).joinpath("recipes")
