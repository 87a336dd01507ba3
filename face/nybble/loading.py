"""From a model's path to an executor with its cache, checked against the memory budget before anything is
loaded."""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .devices import (
    DeviceProfile,
    ExecutorKind,
    MemoryPlan,
    RunSettings,
    choose_isa,
    describe_shortage,
    fit_sequences,
    format_bytes,
    give_back_memory,
    parse_memory_budget,
    plan_within,
    probe,
    resolve_device,
    share_pages,
    with_tuned,
)
from .devices.memory_plan import Half
from .devices.model_bytes import INTEGER_KV
from .errors import DoesNotFitError, ModelFormatError, SettingError
from .kvcache import FileStore
from .records import dataclass
from .runnable import Runnable, RunnableArtifact, RunnableCheckpoint, open_runnable
from .runtime.executor import Executor, KvDtype
from .runtime.speculation import Speculator
from .runtime.tokenizer import Tokenizer
from .speculating import Draft, plain_speculator, wants_draft

CPU_PAGE_SIZE = 16

log = logging.getLogger("nybble")


@dataclass(frozen=True, eq=False)
class Loaded:
    """An opened model, ready to run."""

    executor: Executor
    tokenizer: Tokenizer
    generation_config: Mapping[str, Any]
    eos_token_ids: frozenset[int]
    max_model_len: int
    max_batch_tokens: int
    max_sequences: int
    digest: str  # of what the weights came from
    swap_file: FileStore | None = None
    target_token_ms: float | None = None
    bandwidth: float | None = None  # bytes a second; None where the profile does not say
    speculator: Speculator | None = None
    explain_shortage: Callable[[], str] | None = None  # for where memory runs out

    def close(self) -> None:
        """Frees the model, and the draft model with it. May be called again."""
        self.executor.close()
        if self.speculator is not None:
            self.speculator.close()
        if self.swap_file is not None:
            self.swap_file.close()


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
    cache: bool,
    target_token_ms: float | None = None,
    speculation: str | Path = "off",
    low_power: bool = False,
    tuned: bool = False,
    scratch_folder: str | Path | None = None,
) -> Loaded:
    """Opens a model for `LLM`, whose parameters these are."""
    if executor not in ("auto", "cpu", "ort"):
        raise SettingError(f"executor is {executor!r}; expected auto, cpu or ort")
    for name, value in (("threads", threads), ("max_batch_tokens", max_batch_tokens)):
        if value is not None and value < 1:
            raise SettingError(f"{name} is {value}; expected at least 1")
    scratch = Path(scratch_folder or os.environ.get("TMPDIR") or _disk_folder())
    machine = probe(providers=False)
    profile = resolve_device(device, machine)
    budget = profile.memory_budget
    if memory_budget is not None:
        budget = parse_memory_budget(memory_budget, profile.memory_bytes)
    kind = choose_executor(executor, profile, providers)
    drafted = wants_draft(speculation)
    with ExitStack() as until_loaded:
        with closing(open_runnable(path, format, kind)) as model:
            longest = model.spec.max_position
            if max_model_len is not None and not 1 <= max_model_len <= longest:
                raise SettingError(
                    f"max_model_len is {max_model_len}; expected 1 to {longest}, the model's own context"
                )
            if tuned and device == "auto" and kind == "cpu":
                profile = with_tuned(profile, model.digest, machine)
            max_batch_tokens = max_batch_tokens or profile.token_budget
            threads = threads or (max(1, profile.threads // 2) if low_power else profile.threads)
            if speculation == "auto":
                speculation = profile.speculation or "auto"
            run = RunSettings(
                model.spec,
                model.recipe,
                profile,
                context=max_model_len,
                kv_dtype=choose_kv_dtype(kv_dtype, profile, kind),
                half=_planned_half(model),
                token_budget=max_batch_tokens,
                threads=threads,
                budget=budget,
                executor=kind,
                linear_bytes=model.linear_bytes,
            )
            draft = until_loaded.enter_context(closing(Draft(speculation, run))) if drafted else None
            if draft is not None and budget is not None:
                run = replace(run, budget=budget - draft.bytes)
            plan = _plan(run, max_sequences, path, kv_dtype)
            tokenizer, digest = Tokenizer(model.tokenizer_files), model.digest
            give_back_memory()
            with _explained(run, plan):
                opened = (
                    _open_ort(model, profile, providers, threads, plan.context)
                    if kind == "ort" and isinstance(model, RunnableArtifact | RunnableCheckpoint)
                    else _open_cpu(model, threads, plan, cache, scratch)
                )
        try:
            with _explained(run, plan):
                opened.allocate_kv(plan.num_pages, plan.page_size, plan.kv_dtype)
            if draft is None:
                speculator = plain_speculator(speculation, opened, kind, plan.sequences)
            else:
                speculator = draft.open(opened, tokenizer, plan.sequences, threads, cache, scratch)
        except BaseException:
            opened.close()
            raise
    return Loaded(
        executor=opened,
        tokenizer=tokenizer,
        generation_config=model.generation_config,
        eos_token_ids=eos_token_ids(model.config, model.generation_config, tokenizer),
        max_model_len=plan.context,
        max_batch_tokens=plan.token_budget,
        max_sequences=plan.sequences,
        swap_file=FileStore(scratch) if _shares_pages(plan, kind) else None,
        digest=digest,
        target_token_ms=profile.target_token_ms if target_token_ms is None else target_token_ms,
        bandwidth=profile.bandwidth_at(plan.weights),
        speculator=speculator,
        explain_shortage=partial(describe_shortage, run, plan),
    )


def _disk_folder() -> str:
    if os.path.isdir("/var/tmp"):
        return "/var/tmp"  # /tmp may be memory
    import tempfile  # brings in much that running does not need

    return tempfile.gettempdir()


def choose_executor(asked: str, profile: DeviceProfile, providers: Sequence[str] | None) -> ExecutorKind:
    """The executor that `asked` ("auto", "cpu", "ort") means here. "auto" is our own kernels for a CPU, where
    this installation has them and no execution provider was asked for; else ONNX Runtime."""
    if asked != "auto":
        return "cpu" if asked == "cpu" else "ort"
    on_cpu = providers is None and profile.memory_kind != "gpu" and profile.page_size == CPU_PAGE_SIZE
    return "cpu" if on_cpu and find_spec("nybble._kernels") is not None else "ort"


def choose_kv_dtype(asked: str | None, profile: DeviceProfile, executor: ExecutorKind) -> KvDtype:
    """The cache's type that `asked`, None for the profile's, means to an executor. Raises `SettingError`."""
    allowed: tuple[KvDtype, ...] = ("f32", "f16", "int16", "int8") if executor == "cpu" else ("f32", "f16")
    if asked is None:
        # The nearest that the executor has: our kernels gain nothing from f32, ONNX Runtime has no integers.
        if executor == "cpu":
            return "int16" if profile.kv_dtype == "f32" else profile.kv_dtype
        return "f16" if profile.kv_dtype in INTEGER_KV else profile.kv_dtype
    for kind in allowed:
        if asked == kind:
            return kind
    raise SettingError(f"kv_dtype is {asked!r}; executor {executor!r} has {', '.join(allowed)}")


def eos_token_ids(
    config: Mapping[str, Any], generation_config: Mapping[str, Any], tokenizer: Tokenizer
) -> frozenset[int]:
    """Every end token that the model's files name: `generation_config.json`'s, else `config.json`'s, and the
    tokenizer's. Raises `ModelFormatError`."""
    file, named = "generation_config.json", generation_config.get("eos_token_id")
    if "eos_token_id" not in generation_config:
        file, named = "config.json", config.get("eos_token_id")
    ids = set(named if isinstance(named, list) else [] if named is None else [named])
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise ModelFormatError(f"{file}: eos_token_id is {named!r}; expected token ids")
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(ids)


def _plan(run: RunSettings, max_sequences: int, path: str | Path, asked_kv: str | None) -> MemoryPlan:
    """What is given up to keep to a budget is one line in the log; a warning where answers change by it."""
    if run.executor != "cpu" or run.budget is None:
        return fit_sequences(run, max_sequences)
    other: tuple[KvDtype, ...] = ("int8",) if asked_kv is None and run.kv != "int8" else ()
    plan = plan_within(run, run.budget, max_sequences=max_sequences, kv_dtypes=other)
    plan = share_pages(plan, run, max_sequences)
    if plan.concessions:
        level = logging.INFO if plan.kv_dtype == run.kv else logging.WARNING
        log.log(level, "%s: within %s: %s", path, format_bytes(run.budget), "; ".join(plan.concessions))
    return plan


@contextmanager
def _explained(run: RunSettings, plan: MemoryPlan) -> Iterator[None]:
    """Where memory runs out although the plan had it, the error says what was planned, what was measured, and
    what would help."""
    try:
        yield
    except DoesNotFitError as error:
        raise DoesNotFitError(f"{error}; {describe_shortage(run, plan)}") from error


def _planned_half(model: Runnable) -> Half:
    """What decides how much memory `OrtExecutor` takes: a graph is mapped from its file only where it is one
    that runs as it is."""
    mapped = not isinstance(model, RunnableArtifact) or model.artifact.has_paged_graph
    return model.half if mapped else "gptq"


def _shares_pages(plan: MemoryPlan, executor: ExecutorKind) -> bool:
    """Whether running sequences may find no pages."""
    return executor == "cpu" and plan.num_pages * plan.page_size < plan.sequences * plan.context


def _open_cpu(model: Runnable, threads: int, plan: MemoryPlan, cache: bool, scratch: Path) -> Executor:
    from .runtime.cpu_executor import CpuExecutor

    choose_isa()  # a NYBBLE_ISA that is not there is refused before anything is packed
    source = model.packed(cache, plan.residency, scratch)
    executor = CpuExecutor.from_packed(
        source, threads=threads, max_position=plan.context, residency=plan.residency
    )
    del source  # its table: of a mixture there are thousands of matrices
    give_back_memory()
    executor.reserve(plan.token_budget, plan.sequences)
    return executor


def _with_options(
    profile: DeviceProfile, asked: Sequence[str] | None, offered: Sequence[str]
) -> list[tuple[str, Mapping[str, str]]]:
    """The providers asked for, or else those of a profile that are `offered` here, since it may describe
    another device; each with the options that the profile has for it."""
    options: dict[str, Mapping[str, str]] = dict(profile.provider_list)
    names = [name for name in options if name in offered] if asked is None else asked
    return [(name, options.get(name, {})) for name in names]


def _open_ort(
    model: RunnableArtifact | RunnableCheckpoint,
    profile: DeviceProfile,
    providers: Sequence[str] | None,
    threads: int,
    context: int,
) -> Executor:
    from .runtime.ort_executor import OrtExecutor
    from .runtime.ort_session import ort

    options: dict[str, Any] = {
        "providers": _with_options(profile, providers, ort.get_available_providers()),
        "threads": threads,
        "max_position": context,
    }
    if isinstance(model, RunnableCheckpoint):
        return OrtExecutor.from_weights(model.weights, **options)
    artifact = model.artifact
    if model.half == "onnx" and artifact.has_paged_graph:
        return OrtExecutor.from_file(artifact.onnx_path, **options)
    return OrtExecutor.from_weights(artifact.weights(model.half), **options)
