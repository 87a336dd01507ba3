"""Quantized models for the export tests: round to nearest in numpy, written from the definition and not with
Nybble's quantizer."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from nybble.models.open import open_source
from nybble.models.source import ModelSource
from nybble.quant import packing_rows
from nybble.quant.model import QuantizedModel
from nybble.quant.packing import QuantizedTensor, pack_rows
from nybble.quant.recipe import Recipe


def rtn(weight: NDArray[np.float32], recipe: Recipe, seed: int) -> QuantizedTensor:
    """Round to nearest with f16 scales; for `desc_act` in a random order of the columns."""
    columns = weight.shape[1]
    size = columns if recipe.group_size == -1 else recipe.group_size
    permutation = None
    if recipe.desc_act:
        shuffled = np.random.default_rng(seed).permutation(columns)
        # Inside a group the order carries no meaning; ascending is the one a reader recovers.
        parts = [np.sort(shuffled[i : i + size]) for i in range(0, columns, size)]
        permutation = np.concatenate(parts).astype(np.int32)
        weight = weight[:, permutation]
        if columns <= size:  # one group: any order of the columns is the same weight
            permutation = None
    top = (1 << recipe.bits) - 1
    group = np.arange(columns) // size
    groups = int(group[-1]) + 1
    low = np.stack([weight[:, group == g].min(axis=1) for g in range(groups)], axis=1)
    high = np.stack([weight[:, group == g].max(axis=1) for g in range(groups)], axis=1)
    low, high = np.minimum(low, 0), np.maximum(high, 0)
    if recipe.symmetric:
        scales = (2 * np.maximum(-low, high) / top).astype(np.float16)
        zeros = np.full(scales.shape, 1 << (recipe.bits - 1))
    else:
        scales = ((high - low) / top).astype(np.float16)
        zeros = np.clip(np.rint(-low / scales), 1, top).astype(int)
    codes = np.rint(weight / scales.astype(np.float32)[:, group]) + zeros[:, group]
    bits = max(4, recipe.bits)  # fewer are held as 4, from the middle of 16 on
    middle = (1 << (bits - 1)) - (1 << (recipe.bits - 1))
    codes, zeros = np.clip(codes, 0, top).astype(np.uint8) + np.uint8(middle), zeros + middle
    return QuantizedTensor(
        packed=pack_rows(codes, bits),
        scales=scales,
        zeros=None if recipe.symmetric else zeros.astype(np.uint8),
        bits=bits,
        group_size=size,
        in_features=columns,
        permutation=permutation,
    )


def quantize_source(source: ModelSource, recipe: Recipe) -> QuantizedModel:
    """An opened model, quantized by `rtn`; its layer errors and calibration digest are made up."""
    linears = [x.name for layer in range(source.spec.num_layers) for x in source.spec.linears(layer)]
    tensors: dict[str, QuantizedTensor | NDArray[np.float16]] = {}
    # Parts of one tensor of the checkpoint have one order of columns.
    seeds = {name: seed for seed, name in enumerate(source.spec.stored_tensors())}
    for name, rows in source.spec.stored_rows().items():
        weight, seed = source.tensor(name), seeds[rows.name]
        form = recipe.with_format(recipe.format_of(name))
        tensors[name] = rtn(weight, form, seed) if name in linears else weight.astype(np.float16)
    return QuantizedModel(
        spec=source.spec,
        config=source.config,
        generation_config=source.generation_config,
        tokenizer_files=source.tokenizer_files,
        recipe=recipe,
        origin=source.origin,
        source_digest=source.digest,
        tensors=tensors,
        layer_errors=dict.fromkeys(linears, 0.01),
        calibration_digest="c" * 64,
    )


def quantize_with_rtn(src: str | Path, recipe: Recipe) -> QuantizedModel:
    """What `open_source` opens, quantized by `rtn`."""
    source = open_source(src)
    try:
        return quantize_source(source, recipe)
    finally:
        source.close()


@pytest.fixture(scope="session")
def rtn_model(make_tiny_model: Callable[..., Path]) -> Callable[..., QuantizedModel]:
    """`rtn_model(family="llama", config_overrides={}, **recipe_settings) -> QuantizedModel`"""

    def make(
        family: str = "llama", config_overrides: dict[str, Any] | None = None, **recipe: Any
    ) -> QuantizedModel:
        folder = make_tiny_model(family, **(config_overrides or {}))
        return quantize_with_rtn(folder, Recipe(**{"group_size": 32, **recipe}))

    return make


@pytest.fixture(scope="session")
def quantize_source_with_rtn() -> Callable[[str | Path, Recipe], QuantizedModel]:
    """`quantize_source_with_rtn(src, recipe) -> QuantizedModel` for anything that `open_source` opens."""
    return quantize_with_rtn


@pytest.fixture(params=[1, packing_rows.PIECE_ELEMENTS], ids=["16 rows at once", "all at once"])
def piece_elements(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers give a matrix in as many pieces as can be, and in one."""
    monkeypatch.setattr(packing_rows, "PIECE_ELEMENTS", request.param)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("mounting a tmpfs needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)
