"""An artifact whose layers differ in bits and group size: written, verified, planned and run."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nybble.devices.packed_sizes import packed_bytes
from nybble.export import open_artifact
from nybble.quant.packing import QuantizedTensor
from nybble.runtime.packed_weights import FreshlyPacked

Nybble = Callable[..., Any]


@pytest.fixture(scope="module")
def mixed(make_tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    from nybble import quantize

    out = tmp_path_factory.mktemp("mixed") / "artifact"
    settings = {"samples": 4, "seq_len": 64, "sweeps": 1}
    manifest = quantize(make_tiny_model(), out, recipe="balanced", bits=5.5, **settings)
    assert {form.bits for form in manifest.recipe.all_formats} == {4, 8}
    return out


def test_both_halves_hold_the_layers_own_formats(mixed: Path, nybble: Nybble) -> None:
    result = nybble("verify", mixed)
    assert result.code == 0, result.err
    artifact = open_artifact(mixed)
    recipe = artifact.manifest.recipe
    assert recipe.average_bits == 5.5
    for half in artifact.formats:
        weights = artifact.weights(half)
        for linear in artifact.spec.linears(1):
            tensor = weights.tensor(linear.name)
            assert isinstance(tensor, QuantizedTensor)
            form = recipe.format_of(linear.name)
            assert (tensor.bits, tensor.group_size) == (form.bits, form.group_size)


def test_gptq_config_has_overrides_by_layer(mixed: Path) -> None:
    config = json.loads((mixed / "quantize_config.json").read_text())
    artifact = open_artifact(mixed)
    recipe = artifact.manifest.recipe
    names = [linear.name for layer in range(2) for linear in artifact.spec.linears(layer)]
    own = [name for name in names if recipe.format_of(name) == recipe.format]
    assert (config["bits"], config["group_size"]) == (recipe.bits, recipe.group_size)
    assert len(config["dynamic"]) == len(recipe.layer_formats) == len(names) - len(own) > 0
    assert Counter(map(recipe.format_of, names)).most_common(1)[0][1] == len(own)
    name, form = recipe.layer_formats[0]
    key = "+:^" + name.removesuffix(".weight").replace(".", "\\.") + "$"
    assert config["dynamic"][key] == {"bits": form.bits, "group_size": form.group_size}


def test_planned_bytes_are_the_packed_ones(mixed: Path) -> None:
    artifact = open_artifact(mixed)
    planned = packed_bytes(artifact.spec, artifact.manifest.recipe)
    packed = FreshlyPacked(artifact.weights("gptq"))
    assert planned.layers[0].linears == sum(
        packed.packing(linear.name).nbytes for linear in artifact.spec.linears(0)
    )


@pytest.mark.parametrize("executor", ["cpu", "ort"])
def test_it_runs(mixed: Path, nybble: Nybble, executor: str) -> None:
    result = nybble("run", mixed, "hello", "--raw", "--executor", executor, "--max-tokens", "4")
    assert result.code == 0, result.err
    shown = nybble("info", mixed)
    assert shown.code == 0
    assert "8, group size" in shown.out
