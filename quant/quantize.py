"""`quantize`: a whole model, layer by layer."""

import contextlib
import ctypes
import hashlib
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CalibrationError, MissingDependencyError, SettingError
from ..models.config_reader import shown
from ..models.source import ModelSource
from ..models.spec import ModelSpec
from .bnb import quantize_int8, quantize_nf4
from .budget import check_budget, spend
from .calibration import Calibration
from .checkpoint import Checkpoint, Kept
from .columns import COMPILED
from .forward import embed, fast_dtype, to_torch
from .layer import quantize_layer
from .model import QuantizedModel
from .packing import quantize_head, round_to_f16
from .packing_nf4 import AnyQuantized
from .recipe import LinearFormat, Recipe
from .rtn import quantize_rtn
from .scaling import scaled
from .target import TOKENS_PER_INPUT, trusted_share
from .threads import in_parallel
from .tune import Teacher, tune

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("nybble")

# Called with the stage's name, and how many of how many steps are done.
Progress = Callable[[str, int, int], None]
Quantized = dict[str, AnyQuantized | NDArray[np.float16]]
# What each channel of the named linear layer's input counts for, [in]; None where that is not known.
Importance = Callable[[str], NDArray[np.float32] | None]

STAGE, TUNE_STAGE = "quantize", "tune"
STREAMS = ("hidden", "reference")  # of the calibration text, as a checkpoint keeps them


def quantize(
    source: ModelSource,
    recipe: Recipe,
    calibration: Calibration | None = None,
    *,
    progress: Progress | None = None,
    threads: int | None = None,
    checkpoint: Checkpoint | None = None,
) -> QuantizedModel:
    """Quantizes every linear layer of the decoder; embedding, head, norms, biases and gates become float16.

    With `scaling` the scales are chosen first, in a pass of the float model over the beginning of the
    calibration text. With GPTQ each layer sees that text as the already quantized layers before it pass it
    on, starting from the 8-bit embedding that the runtime will use. Other methods need none. Tensors are read
    from the source when their turn comes: at most the float32 weights of one layer are held, beside the
    results and, for GPTQ, the hidden states of the calibration text and one layer's work on them.

    Finished layers are kept in `checkpoint`, where one is given and the run takes so long that it pays; the
    run goes on after the last that an earlier one kept there, with the same result. Raises `SettingError`
    where it holds work of a run that was not the same.

    `threads` is torch's number of threads for the duration. Given the same model, recipe, text, library
    versions and threads, the result is the same to the last bit. Raises `QuantizationError` naming the
    tensor, and `MissingDependencyError` without torch.
    """
    try:
        import torch
    except ImportError:
        raise MissingDependencyError("quantizing needs torch: pip install 'nybble[quantize]'") from None
    if threads is not None and threads < 1:
        raise SettingError(f"threads is {threads}; expected at least 1")
    if recipe.needs_text and calibration is None:
        what = "method gptq" if recipe.method == "gptq" else "scaling"
        raise CalibrationError(f"{what} needs a calibration text; none was given")
    spec = source.spec
    check_recipe(recipe, spec)
    if recipe.needs_text and calibration is not None:
        _check_tokens(spec, calibration.token_ids)
    if recipe.correction and recipe.method == "gptq" and calibration is not None:
        _say_if_short(spec, recipe, calibration.token_ids.size)
    report = progress or (lambda stage, done, total: None)
    report(STAGE, 0, spec.num_layers)
    names = dict.fromkeys((spec.embedding_name, spec.final_norm_name, spec.head_name))
    ends = {name: half(source, name) for name in names}
    tensors: Quantized = {**ends}
    errors: dict[str, float] = {}
    starved: dict[str, int] = {}
    checkpoint = checkpoint or Checkpoint(None)
    with _threads(threads), torch.no_grad():
        hidden = reference = None
        first, kept = 0, checkpoint.load(run_key(source, recipe, calibration))
        importance: Importance = _unknown
        if recipe.scaling and calibration is not None:
            source = folded = scaled(source, recipe, calibration.token_ids)
            importance = folded.importance_of
        formats = _formats(source, recipe, calibration, kept)
        if kept is not None:
            first = kept.layers
            tensors |= kept.tensors
            errors |= kept.errors
            states = {name: to_torch(array) for name, array in kept.state.items() if name in STREAMS}
            hidden, reference = states.get("hidden"), states.get("reference")
            starved |= _counts(kept.state.get("starved", ()))
            report(STAGE, first, spec.num_layers)
        elif recipe.method == "gptq" and calibration is not None:
            name, ids = spec.embedding_name, calibration.token_ids
            # Rows are quantized one by one: some of them are as they are among all.
            hidden = _embedded(spec, ids, lambda used: quantize_head(ends[name][used], name))
            if recipe.follows_reference:
                reference = _embedded(spec, ids, lambda used: source.tensor(name)[used])
        for layer in range(first, spec.num_layers):
            if hidden is None:
                _rtn_layer(source, layer, recipe, importance, tensors, errors)
            else:
                found = quantize_layer(source, layer, recipe, hidden, reference, formats)
                tensors |= found.tensors
                errors |= found.errors
                if found.starved_experts:
                    starved[str(layer)] = found.starved_experts
            return_free_memory()
            checkpoint.save(
                layer,
                {name: tensors[name] for name in spec.layer_tensors(layer)},
                {linear.name: errors[linear.name] for linear in spec.linears(layer)},
                _state(hidden, reference, starved, layer) | _chosen(formats, recipe),
                now=layer == spec.num_layers - 1 and recipe.tune_epochs > 0,  # which takes long
            )
            report(STAGE, layer + 1, spec.num_layers)
        if recipe.tune_epochs and reference is not None and calibration is not None:
            hidden = None  # its memory is needed
            teacher = Teacher(
                reference,
                to_torch(source.tensor(spec.final_norm_name)),
                to_torch(source.tensor(spec.head_name)),
            )
            tensors |= tune(
                spec,
                tensors,
                calibration.token_ids,
                teacher,
                epochs=recipe.tune_epochs,
                learning_rate=recipe.tune_rate,
                seed=recipe.seed,
                report=lambda done, total: report(TUNE_STAGE, done, total),
            )
    return QuantizedModel(
        spec=spec,
        config=source.config,
        generation_config=source.generation_config,
        tokenizer_files=source.tokenizer_files,
        recipe=_recorded(recipe, formats),
        origin=source.origin,
        source_digest=source.digest,
        tensors={name: tensors[name] for name in spec.tensors()},
        layer_errors=errors,
        starved_experts=starved,
        calibration_digest=calibration.digest if recipe.needs_text and calibration is not None else None,
    )


def check_recipe(recipe: Recipe, spec: ModelSpec) -> None:
    """Raises `SettingError` for settings that do not suit the model. Worth calling before a calibration text
    is made."""
    if spec.mixture is not None and (recipe.tune_epochs or recipe.average_bits):
        name = "tune_epochs" if recipe.tune_epochs else "average_bits"
        raise SettingError(
            f"{name} is {getattr(recipe, name)}; expected 0: a mixture of experts has no gradient here"
        )
    stored = [x for layer in range(spec.num_layers) for x in spec.stored_linears(layer)]
    linears = [part.name for x in stored for part in x.parts]
    if recipe.average_bits:
        if recipe.layer_formats:
            raise SettingError("layer_formats are set; expected none with average_bits, which chooses them")
        check_budget(spec, recipe)
    if unknown := sorted({name for name, _ in recipe.layer_formats} - set(linears)):
        raise SettingError(
            f"layer_formats: {shown(unknown[0])} is no linear layer of the model; expected {linears[0]} or "
            "the like"
        )
    for linear, parts in stored:
        formats = {part.name: recipe.format_of(part.name) for part in parts}
        if len(set(formats.values())) > 1:
            raise SettingError(
                f"layer_formats: {' and '.join(formats)} differ; expected the same for all: they are one "
                f"tensor of a checkpoint, {linear.name}"
            )


def _check_tokens(spec: ModelSpec, token_ids: NDArray[np.int32]) -> None:
    if token_ids.size and not (token_ids.min() >= 0 and token_ids.max() < spec.vocab_size):
        raise CalibrationError(
            f"calibration token {token_ids.max()} is not in the model's vocabulary of {spec.vocab_size}"
        )


def _say_if_short(spec: ModelSpec, recipe: Recipe, tokens: int) -> None:
    layers = [layer for layer in range(spec.num_layers) if spec.mixture_of(layer) is None]
    if not layers:  # a mixture's have no correction
        return
    widest = max(linear.in_features for layer in layers for linear in spec.linears(layer))
    if trusted_share(1.0, tokens, widest) < 1:
        log.warning(
            "the calibration text has %d tokens, and layers have up to %d inputs: correction, %g, is "
            "lessened there; %d tokens are enough for all of it",
            tokens, widest, recipe.correction, TOKENS_PER_INPUT * widest,
        )  # fmt: skip


def _formats(
    source: ModelSource, recipe: Recipe, calibration: Calibration | None, kept: Kept | None
) -> dict[str, LinearFormat]:
    """Each linear layer's format by its name."""
    spec = source.spec
    linears = [x.name for layer in range(spec.num_layers) for x in spec.linears(layer)]
    if recipe.average_bits and calibration is not None:
        if kept is None:
            return spend(source, recipe, calibration.token_ids)
        rows = kept.state["formats"].tolist()
        return {
            name: LinearFormat(bits, group_size, bool(symmetric))
            for name, (bits, group_size, symmetric) in zip(linears, rows, strict=True)
        }
    return {name: recipe.format_of(name) for name in linears}


def _recorded(recipe: Recipe, formats: dict[str, LinearFormat]) -> Recipe:
    """The recipe as a manifest has it: with all formats, and as its own, where a budget chose them, the one
    that most layers have."""
    own = Counter(formats.values()).most_common(1)[0][0] if recipe.average_bits else recipe.format
    differing = tuple((name, form) for name, form in formats.items() if form != own)
    return replace(recipe.with_format(own), layer_formats=differing)


def _chosen(formats: dict[str, LinearFormat], recipe: Recipe) -> dict[str, NDArray[np.int32]]:
    """What a budget was spent on, as a checkpoint keeps it: a row for each linear layer."""
    if not recipe.average_bits:
        return {}
    return {"formats": np.array([(x.bits, x.group_size, x.symmetric) for x in formats.values()], np.int32)}


def run_key(source: ModelSource, recipe: Recipe, calibration: Calibration | None) -> dict[str, Any]:
    """What a run's results depend on, in values that JSON has."""
    import torch

    from .. import __version__

    text = None if calibration is None else calibration.token_ids
    return {
        "model": source.digest,
        "recipe": recipe.to_json(),
        "calibration text": None if text is None else hashlib.sha256(text.tobytes()).hexdigest(),
        "version of a library": [__version__, np.__version__, torch.__version__],
        "number of threads": torch.get_num_threads(),
        "instruction set": [
            torch.backends.cpu.get_cpu_capability(),
            str(fast_dtype()),
            "compiled" if COMPILED else "torch",
        ],
    }


def _state(
    hidden: "Tensor | None", reference: "Tensor | None", starved: dict[str, int], layer: int
) -> dict[str, NDArray[Any]]:
    """What the layers after `layer` go on from."""
    if hidden is None:
        return {}
    streams = {"hidden": hidden} if reference is None else {"hidden": hidden, "reference": reference}
    return {name: stream.numpy() for name, stream in streams.items()} | {"starved": _by_layer(starved, layer)}


def _by_layer(starved: dict[str, int], last: int) -> NDArray[np.float32]:
    """Starved experts of each layer up to `last`, as a checkpoint keeps them."""
    return np.array([starved.get(str(layer), 0) for layer in range(last + 1)], np.float32)


def _counts(by_layer: Iterable[float]) -> dict[str, int]:
    """The inverse."""
    return {str(layer): int(count) for layer, count in enumerate(by_layer) if count}


def half(source: ModelSource, name: str) -> NDArray[np.float16]:
    """A tensor of the source in float16. Raises `QuantizationError` naming it where a value does not fit."""
    return round_to_f16(source.tensor(name), name)


@contextlib.contextmanager
def _threads(count: int | None) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def return_free_memory() -> None:
    """Gives freed memory back to the system, where the C library is glibc: results that stay between
    temporaries of a few megabytes split its heap, which otherwise grows by several times what stays."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


def _embedded(
    spec: ModelSpec,
    token_ids: NDArray[np.int32],
    rows: Callable[[NDArray[np.int32]], AnyQuantized | NDArray[Any]],
) -> "Tensor":
    """The calibration text through an embedding, [samples, seq_len, hidden]; `rows` gives those of some
    tokens, so that only the ones that occur are dequantized."""
    used, index = np.unique(token_ids, return_inverse=True)
    return embed(spec, to_torch(rows(used)), index.reshape(token_ids.shape))


def _unknown(name: str) -> None:
    """Of a linear layer's input nothing is known: its channels count alike."""


def _rtn_layer(
    source: ModelSource,
    layer: int,
    recipe: Recipe,
    importance_of: Importance,
    tensors: Quantized,
    errors: dict[str, float],
) -> None:
    linears = [linear.name for linear in source.spec.linears(layer)]
    for name in source.spec.layer_tensors(layer).keys() - set(linears):
        tensors[name] = half(source, name)
    weights = {name: to_torch(source.tensor(name)) for name in linears}

    def rounded(name: str) -> tuple[AnyQuantized, float]:
        weight = weights[name]
        importance = None if (known := importance_of(name)) is None else to_torch(known)
        quantized = _rounded(weight, recipe.with_format(recipe.format_of(name)), name, importance)
        energy = float(weight.square().sum())
        error = float((to_torch(quantized) - weight).square().sum())
        return quantized, error / energy if energy > 0 else 0.0

    for name, (quantized, error) in zip(linears, in_parallel(rounded, linears), strict=True):
        tensors[name], errors[name] = quantized, error


def _rounded(weight: "Tensor", recipe: Recipe, name: str, importance: "Tensor | None") -> AnyQuantized:
    """A weight by itself, as a method without calibration has it."""
    if recipe.method == "nf4":
        return quantize_nf4(weight, recipe.group_size, name)
    if recipe.method == "int8":
        return quantize_int8(weight, name)
    return quantize_rtn(weight, recipe, name, importance)
