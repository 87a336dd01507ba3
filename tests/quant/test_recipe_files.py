"""Named recipes and recipes from files."""

from pathlib import Path

import pytest

from nybble.errors import SettingError
from nybble.quant.recipe import METHODS, LinearFormat, Recipe
from nybble.quant.recipe_files import DEFAULT, load_recipe, recipe_names


def test_the_recipes_that_come_with_nybble() -> None:
    assert recipe_names() == ["balanced", "best", "fast"]
    assert load_recipe() == load_recipe(DEFAULT) == load_recipe("balanced")
    assert load_recipe("fast").method == "rtn"
    assert load_recipe("fast").needs_text
    assert not Recipe(method="rtn").needs_text
    assert load_recipe("best").tune_epochs > 0


def test_a_file_and_what_it_leaves_out(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('bits = 8\ndamp = 1e-2\n[layer_formats]\n"a.weight" = [4, 32, false]\n')
    recipe = load_recipe(str(path))
    assert recipe == Recipe(bits=8, layer_formats=(("a.weight", LinearFormat(4, 32, False)),))
    assert recipe.format_of("a.weight") == LinearFormat(4, 32, False)
    assert recipe.format_of("b.weight") == LinearFormat(8, 64, True)
    assert Recipe.from_json(recipe.to_json()) == recipe


def test_a_manifest_from_before_a_setting_was_there() -> None:
    old = {"method": "gptq", "bits": 4, "group_size": 64, "symmetric": True, "act_order": "static"}
    assert Recipe.from_json(old) == Recipe()
    assert Recipe.from_json({**old, "formats": {"a": [8, 64, True]}}).format_of("a").bits == 8
    assert not Recipe.from_json(old).follows_reference


@pytest.mark.parametrize("name", ["balanced", "fast"])
@pytest.mark.parametrize("method", METHODS)
def test_another_method_leaves_nothing_of_gptq_in_a_recipe(name: str, method: str) -> None:
    recipe = load_recipe(name).changed(method=method)
    assert recipe.method == method
    if method != "gptq":
        assert (recipe.correction, recipe.weigh_tokens, recipe.sweeps) == (0, False, 0)
    with pytest.raises(SettingError, match="sweeps is 3; expected 0 for method rtn"):
        load_recipe(name).changed(method="rtn", sweeps=3)


def test_an_older_manifest_names_what_its_method_did_nothing_of() -> None:
    old = {"method": "rtn", "bits": 4, "correction": 0.5, "weigh_tokens": True, "sweeps": 4}
    assert Recipe.from_manifest(old) == Recipe(method="rtn")
    with pytest.raises(SettingError, match="correction is"):
        Recipe.from_json(old)
    gptq = load_recipe("best")
    assert Recipe.from_manifest(gptq.to_json()) == gptq


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bits = ", "not TOML"),
        ("bits = 5", "bits is 5; expected 3, 4 or 8"),
        ("bits = true", "bits is True; expected a int"),
        ("correction = 2", "correction is 2.0; expected a share from 0 to 1"),
        ("colour = 1", "unknown settings: 'colour'"),
        ("average_bits = 2.5", "average_bits is 2.5"),
        ('method = "rtn"\naverage_bits = 4.5', "average_bits is 4.5; expected 0 for method rtn"),
        ('method = "rtn"\ntune_epochs = 1', "tune_epochs is 1; expected 0 for method rtn"),
        ('method = "rtn"\ncorrection = 0.5', "correction is 0.5; expected 0.0 for method rtn"),
        ('method = "rtn"\nweigh_tokens = true', "weigh_tokens is True; expected False for method rtn"),
        ('method = "rtn"\nsweeps = 4', "sweeps is 4; expected 0 for method rtn"),
        (
            'method = "int8"\nbits = 8\ngroup_size = -1\nclip_search = false\n'
            "[layer_formats]\na = [4, 32, true]",
            "expected none for method int8",
        ),
        ("average_bits = 4.8\ngroup_size = 128", "group_size stand beside average_bits"),
        ("average_bits = 4.8\n[layer_formats]\na = [4, 32, true]", "layer_formats stand beside average_bits"),
        ("layer_formats = 1", "layer_formats is no object"),
        ("[layer_formats]\na = [4, 32]", "layer_formats holds a list"),
        ("[layer_formats]\na = [5, 32, true]", "layer_formats is"),
        ("sweeps = 1000", "sweeps is 1000"),
        ('damp = "much"', "damp is 'much'"),
    ],
)
def test_files_that_are_no_recipe(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(SettingError) as caught:
        load_recipe(str(path))
    assert message in str(caught.value)
    assert "bad.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_names_and_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="recipe 'fine' is unknown; expected balanced, best, fast"):
        load_recipe("fine")
    with pytest.raises(SettingError, match="can't be read"):
        load_recipe(str(tmp_path / "none.toml"))
    with pytest.raises(SettingError, match="can't be read: embedded null byte"):
        load_recipe("a\0b.toml")
