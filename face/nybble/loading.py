"""From an artifact folder to an executor with its cache, checked against the memory budget before anything is
loaded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .devices import (
    DeviceProfile,
    MemoryPlan,
    check_fit,
    parse_memory_budget,
    plan_memory,
    resolve_device,
)
from .errors import ModelFormatError, SettingError
from .export.artifact import Artifact, open_artifact
from .models.spec import ModelSpec
from .quant.recipe import Recipe
from .runtime.executor import Executor, KvDtype
from .runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from .export.manifest import Format

ExecutorName = Literal["auto", "cpu", "ort"]


@dataclass(frozen=True, eq=False)
class Loaded:
    """An opened model, ready to run."""

    executor: Executor
    tokenizer: Tokenizer
    generation_config: Mapping[str, Any]
    eos_token_ids: frozenset[int]
    max_model_len: int
    max_batch_tokens: int
    max_sequences: int = 16


def load(
    path: str | Path,
    *,
    device: str,
    executor: str,
    format: str,
    providers: Sequence[str] | None,
    threads: int | None,
    memory_budget: int | float | str | None,
    max_model_len: int | None,
    max_batch_tokens: int | None,
    max_sequences: int,
    kv_dtype: str | None,
) -> Loaded:
    """Opens an artifact for `LLM`, whose parameters these are."""
    if executor not in ("auto", "cpu", "ort"):
        raise SettingError(f"executor is {executor!r}; expected auto, cpu or ort")
    if executor == "cpu":
        raise SettingError("executor is 'cpu'; this build has no CPU kernels for a decoder, use 'ort'")
    for name, value in (("threads", threads), ("max_batch_tokens", max_batch_tokens)):
        if value is not None and value < 1:
            raise SettingError(f"{name} is {value}; expected at least 1")
    profile = resolve_device(device)
    budget = profile.memory_budget
    if memory_budget is not None:
        budget = parse_memory_budget(memory_budget, profile.memory_bytes)
    artifact = open_artifact(path, format)
    half = artifact.chosen(format, preferred="onnx")
    plan = plan_run(
        artifact.spec,
        artifact.manifest.recipe,
        profile,
        half=half,
        context=max_model_len,
        max_sequences=max_sequences,
        kv_dtype=_kv_dtype(kv_dtype, profile),
        token_budget=max_batch_tokens,
        budget=budget,
    )
    tokenizer = Tokenizer(artifact.tokenizer_files)
    loaded = _open_ort(artifact, half, profile, providers, threads or profile.threads)
    try:
        loaded.allocate_kv(plan.num_pages, plan.page_size, plan.kv_dtype)
    except BaseException:
        loaded.close()
        raise
    return Loaded(
        executor=loaded,
        tokenizer=tokenizer,
        generation_config=artifact.generation_config,
        eos_token_ids=eos_token_ids(artifact.config, artifact.generation_config, tokenizer),
        max_model_len=plan.context,
        max_batch_tokens=max_batch_tokens or profile.token_budget,
        max_sequences=plan.sequences,
    )


def plan_run(
    spec: ModelSpec, recipe: Recipe | None, profile: DeviceProfile, *, max_sequences: int, **options: Any
) -> MemoryPlan:
    """The plan with as many sequences at once, each with a whole context, as the budget allows: from one to
    `max_sequences`. `options` are `devices.check_fit`'s. Raises `DoesNotFitError` when not even one fits."""
    if max_sequences < 1:
        raise SettingError(f"max_sequences is {max_sequences}; expected at least 1")
    plan = check_fit(spec, recipe, profile, sequences=1, **options)
    for sequences in range(2, max_sequences + 1):
        larger = plan_memory(spec, recipe, profile, sequences=sequences, **options)
        if not larger.fits:
            break
        plan = larger
    return plan


def _kv_dtype(asked: str | None, profile: DeviceProfile) -> KvDtype:
    if asked is None:
        # ONNX Runtime's attention has no 8-bit cache: the nearest it has is f16.
        return "f16" if profile.kv_dtype == "int8" else profile.kv_dtype
    if asked == "f32":
        return "f32"
    if asked == "f16":
        return "f16"
    raise SettingError(f"kv_dtype is {asked!r}; expected f32 or f16")


def eos_token_ids(
    config: Mapping[str, Any], generation_config: Mapping[str, Any], tokenizer: Tokenizer
) -> frozenset[int]:
    """Every end token that the model's files name: `generation_config.json`'s, else `config.json`'s, and the
    tokenizer's. Raises `ModelFormatError`."""
    named = generation_config.get("eos_token_id", config.get("eos_token_id"))
    ids = set(named if isinstance(named, list) else [] if named is None else [named])
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise ModelFormatError(f"generation_config.json: eos_token_id is {named!r}; expected token ids")
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(ids)


def _open_ort(
    artifact: Artifact, half: "Format", profile: DeviceProfile, providers: Sequence[str] | None, threads: int
) -> Executor:
    from .runtime.ort_executor import OrtExecutor
    from .runtime.ort_session import ort

    if providers is None:
        # A profile may name providers of the device that it describes; those here count.
        offered = set(ort.get_available_providers())
        providers = [provider.name for provider in profile.providers if provider.name in offered]
    if half == "onnx":
        return OrtExecutor.from_file(artifact.onnx_path, providers=providers, threads=threads)
    return OrtExecutor.from_weights(artifact.weights(half), providers=providers, threads=threads)
