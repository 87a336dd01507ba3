"""`plan`: what a model would need on a device and how fast it would be, before anything is loaded, quantized
or even downloaded: a `config.json` is enough."""

import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from .devices import (
    DeviceProfile,
    MemoryPlan,
    Rates,
    RunSettings,
    Speeds,
    Way,
    disk_read_rate,
    load_profile,
    measured,
    parse_memory_budget,
    plan_memory,
    plan_within,
    predict,
    probe,
    resolve_device,
    smallest_plan,
    ways_to_fit,
)
from .devices.memory_plan import Half
from .errors import DoesNotFitError, NybbleError
from .loading import choose_executor, choose_kv_dtype
from .models.config import spec_from_config
from .models.config_reader import read_json_object
from .models.hub_cache import located
from .models.open import ALIASES
from .models.spec import ModelSpec
from .quant.recipe import Recipe
from .records import dataclass
from .runnable import open_runnable

MANIFEST = "nybble.json"
LENGTH = 512  # tokens of the prompt that speeds are predicted for


@dataclass(frozen=True)
class PlannedModel:
    """What a plan has to know of a model. Without a recipe `linear_bytes` are a GGUF file's."""

    spec: ModelSpec
    recipe: Recipe | None
    half: Half
    linear_bytes: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Planned:
    """A plan, which fits or not; the speeds predicted for it, in the middle of things and at the end of its
    context; and what would fit where it does not."""

    model: PlannedModel
    profile: DeviceProfile
    run: RunSettings
    plan: MemoryPlan
    rates: Rates | None
    speeds: Speeds | None
    speeds_at_end: Speeds | None
    ways: tuple[Way, ...]


def plan(
    path: str | Path,
    device: str = "auto",
    *,
    context: int | None = None,
    sequences: int = 1,
    bits: int | None = None,
    group_size: int | None = None,
    kv_dtype: str | None = None,
    memory_budget: str | None = None,
    executor: str = "auto",
) -> Planned:
    """Plans for an artifact, a GGUF file, an alias, a Hugging Face folder or its `config.json`. What is not
    quantized yet, or is to be quantized anew, is planned for with `bits` and `group_size`; a device that is
    not "auto" as its profile says, whatever this machine is. With `memory_budget` weights are streamed where
    they do not fit. Raises what opening the model raises, and `SettingError`."""
    profile = resolve_device("auto") if device == "auto" else load_profile(device)
    kind = choose_executor(executor, profile, None)
    model = open_planned(path, bits, group_size)
    budget = profile.memory_budget
    if memory_budget is not None:
        budget = parse_memory_budget(memory_budget, profile.memory_bytes)
    run = RunSettings(
        model.spec,
        model.recipe,
        profile,
        context=context,
        sequences=sequences,
        kv_dtype=choose_kv_dtype(kv_dtype, profile, kind),
        half=model.half,
        budget=budget,
        executor=kind,
        linear_bytes=model.linear_bytes,
    )
    found = plan_memory(run)
    if not found.fits and memory_budget is not None and budget is not None and kind == "cpu":
        try:
            found = plan_within(run, budget)
        except DoesNotFitError:
            found = smallest_plan(run)
            run = replace(run, residency=found.residency, token_budget=found.token_budget)
    ways = () if found.fits else ways_to_fit(run)
    rates = _rates(profile, device, path if found.residency.streams else None)
    run = replace(run, residency=found.residency, token_budget=found.token_budget)
    return Planned(
        model,
        profile,
        run,
        found,
        rates,
        predict(run, found, rates, LENGTH),
        predict(run, found, rates, found.context),
        ways,
    )


def open_planned(path: str | Path, bits: int | None = None, group_size: int | None = None) -> PlannedModel:
    """What can be known of a model without its weights. `bits` and `group_size` stand for the recipe of what
    is quantized otherwise."""
    if str(path) not in ALIASES:
        path = located(path)
    chosen: dict[str, Any] = {"bits": bits, "group_size": group_size}
    chosen = {name: value for name, value in chosen.items() if value is not None}
    plain, config = Recipe(**chosen), _config(path)
    if config is not None:
        return PlannedModel(spec_from_config(config, str(path)), plain, "gptq")
    with closing(open_runnable(path, "auto", "cpu")) as model:
        if not chosen:
            return PlannedModel(model.spec, model.recipe, model.half, model.linear_bytes)
        known = model.recipe is not None and not model.recipe.is_bnb
        recipe = model.recipe.changed(**chosen) if model.recipe and known else plain
        return PlannedModel(model.spec, recipe, "gptq")


def _config(path: str | Path) -> Mapping[str, Any] | None:
    """The `config.json` of a folder with a model that is not quantized yet, or that is named itself; None for
    anything else."""
    file = Path(path)
    if str(path) in ALIASES and not os.path.exists(path):
        return None
    if os.path.isdir(path):
        file = file / "config.json"
        if os.path.lexists(file.with_name(MANIFEST)):
            return None
        config = read_json_object(file, str(file))
        return None if config.get("quantization_config") else config
    return read_json_object(file, str(file)) if file.suffix == ".json" else None


def _rates(profile: DeviceProfile, device: str, streamed_from: str | Path | None) -> Rates | None:
    """The profile's; for "auto" this machine's, measured if need be, with those of the disk under a model
    that is streamed."""
    if device != "auto":
        return Rates.of(profile)
    limits = measured(probe(providers=False)).limits
    if limits is None or profile.memory_kind == "gpu":
        return None
    disk = None
    if streamed_from is not None and os.path.exists(streamed_from):
        try:
            disk = disk_read_rate(streamed_from).bytes_per_second
        except NybbleError:
            disk = None  # a folder that cannot be written, with a config.json alone
    return Rates.measured(limits, disk)
