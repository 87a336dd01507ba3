"""Activation-aware scaling: input channels that count for more are given a finer grid, and the model stays
the same function.

A linear layer's columns are multiplied by s, one number for each input channel, and what gives the input is
divided by it: the norm before, or the rows of the linear layer before. A group of weights shares one grid,
and what rounding does to channel j is divided by s_j again. As in AWQ (https://arxiv.org/abs/2306.00978) s is
a power of what the channel counts for, over a power of its weights' root mean square: large weights have a
coarse grid by themselves. The powers are those of least error of plain rounding.

What a channel counts for, d, is its mean square where rounding is all that is done. GPTQ makes good what the
other channels can make good, and leaves of channel j what these do not predict: d is then its variance given
the others, 1 / (H⁻¹)_jj.

Four places of a layer take scales: the norm before q, k and v; v before o, where query heads that share a
head of keys and values share their scales; the norm before gate and up, or before a mixture, whose router
stays the function that it is; and up before down, in each expert. Where no norm stands directly before,
nothing is done.
"""

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import QuantizationError
from ..models.source import ModelSource
from ..models.spec import ModelSpec
from ..records import dataclass
from .forward import embed, fast_dtype, layer_stages, to_torch
from .gptq import factored
from .recipe import LinearFormat, Recipe
from .scales import group_scales
from .statistics import hessian
from .threads import in_parallel

if TYPE_CHECKING:
    from torch import Tensor

Powers = tuple[float, float]  # of what channels count for, and of their weights' size

# Of the calibration text, for the search: 1 / (H⁻¹)_jj of too few is noise.
TOKENS_PER_INPUT = 3
POWERS = (0.0, 0.25, 0.5, 0.75, 1.0)  # that are tried, of both
START = (0.5, 0.5)
ROWS = 128  # of each linear layer, at equal distances, that the search looks at
SMALLEST = 1e-8  # square of a channel, as a share of the largest
LARGEST = 128.0  # scale, and one over the smallest: norms stay within float16's range


@dataclass(frozen=True)
class Fold:
    """Where scales go: `before` is divided by them, a norm's weight or a linear layer's rows, and the columns
    of `readers` are multiplied. `heads`: how many in a row of a reader's input have the same scales, and
    their size; (1, 0) where each channel has its own."""

    before: str
    readers: tuple[str, ...]
    heads: tuple[int, int] = (1, 0)

    def spread(self, scales: NDArray[Any]) -> NDArray[Any]:
        """Of the readers' columns, of those of what is before."""
        count, size = self.heads
        return scales if count == 1 else np.repeat(scales.reshape(-1, 1, size), count, axis=1).reshape(-1)


def folds(spec: ModelSpec, layer: int) -> tuple[Fold, ...]:
    """The layer's, in the order data meets them."""
    norms = spec.layer_norms(layer)
    q, k, v, o, *mlp = (linear.name for linear in spec.linears(layer))
    found = []
    if norms.before_attention is not None:
        found.append(Fold(norms.before_attention, (q, k, v)))
    found.append(Fold(v, (o,), (spec.num_heads // spec.num_kv_heads, spec.head_dim)))
    experts = [mlp[i : i + 3] for i in range(0, len(mlp), 3)]
    if norms.before_mlp is not None:
        readers = [name for gate, up, _ in experts for name in (gate, up)]
        found.append(Fold(norms.before_mlp, (*spec.gates(layer), *readers)))
    found += [Fold(up, (down,)) for _, up, down in experts]
    return tuple(found)


@dataclass(frozen=True, eq=False)
class _Inputs:
    """What the calibration text says of a linear layer's input: its number of tokens, and what each channel
    counts for, [in] float32."""

    tokens: int
    importance: "Tensor"


def scaled(
    source: ModelSource, recipe: Recipe, token_ids: NDArray[np.int32], layers: int | None = None
) -> "ScaledSource":
    """The model with the scales that suit a recipe, searched on the first windows of a calibration text
    [samples, seq_len] in the float model, a layer at a time; only the first `layers`, where a number is
    given. Raises `QuantizationError` naming the linear layers whose inputs are not finite."""
    spec = source.spec
    linears = [linear for layer in range(spec.num_layers) for linear in spec.linears(layer)]
    enough = TOKENS_PER_INPUT * max(linear.in_features for linear in linears)
    ids = token_ids[: -(-enough // token_ids.shape[1])]
    used, index = np.unique(ids, return_inverse=True)
    hidden = embed(spec, to_torch(source.tensor(spec.embedding_name)[used]), index.reshape(ids.shape))
    result = ScaledSource(source)
    for layer in range(spec.num_layers if layers is None else layers):
        weights = {name: to_torch(source.tensor(name)) for name in spec.layer_tensors(layer)}
        inputs = _pass(spec, layer, weights, hidden, recipe)
        # A mixture has many, of which an expert that no token reaches has none.
        known = [fold for fold in folds(spec, layer) if any(name in inputs for name in fold.readers)]
        search = partial(_search, weights=weights, inputs=inputs, recipe=recipe)
        for fold, scales in zip(known, in_parallel(search, known), strict=True):
            result.fold(layer, fold, scales)
        if recipe.method == "rtn":
            result.importance |= {name: of.importance.numpy() for name, of in inputs.items()}
    return result


def _pass(
    spec: ModelSpec, layer: int, weights: "Mapping[str, Tensor]", hidden: "Tensor", recipe: Recipe
) -> dict[str, _Inputs]:
    """Moves `hidden` through a layer; what its linear layers' inputs were, by name. An expert that no token
    reaches is left out."""
    linears, kind = spec.linears(layer), fast_dtype()
    if spec.mixture_of(layer) is None:
        weights = {**weights, **{linear.name: weights[linear.name].to(kind) for linear in linears}}
    found: dict[str, _Inputs] = {}
    for stage in layer_stages(spec, layer, weights, hidden, batch=1, calibrate=False):
        names = [linear.name for linear in stage.linears]
        try:
            importance = _importance(stage.inputs, recipe)
        except QuantizationError as error:
            raise QuantizationError(f"{' and '.join(names)}: {error}") from None
        found |= dict.fromkeys(names, _Inputs(len(stage.inputs), importance))
    return found


def _importance(inputs: "Tensor", recipe: Recipe) -> "Tensor":
    """What each channel of inputs [tokens, in] counts for, [in]."""
    import torch

    if recipe.method == "gptq":
        _, lower = factored(hessian(inputs), recipe.damp)
        return 1 / torch.cholesky_inverse(lower).diagonal()
    importance = inputs.square().mean(0)
    if not importance.isfinite().all():
        raise QuantizationError("its input on the calibration text is not finite")
    return importance


def _search(
    fold: Fold, weights: "Mapping[str, Tensor]", inputs: Mapping[str, _Inputs], recipe: Recipe
) -> NDArray[np.float32]:
    """The scales of least error, of what is before the fold, in those of its readers with known inputs."""
    import torch

    names = [name for name in fold.readers if name in inputs]
    tokens = sum(inputs[name].tokens for name in names)
    shares = {name: inputs[name].tokens / tokens for name in names}
    every = {name: -(-len(weights[name]) // ROWS) for name in names}
    some = {name: weights[name][:: every[name]].T.contiguous() for name in names}
    counts = torch.stack([inputs[name].importance * share for name, share in shares.items()]).sum(0)
    sizes = torch.stack([some[name].square().mean(1) * share for name, share in shares.items()]).sum(0)
    of_input, of_weights = (_logarithm(fold, x) for x in (counts, sizes))

    def scales_of(powers: Powers) -> NDArray[np.float32]:
        logarithms = of_input * powers[0] - of_weights * powers[1]
        return np.asarray(logarithms.exp().clamp(1 / LARGEST, LARGEST).numpy(), np.float32)

    @cache
    def error_of(powers: Powers) -> float:
        columns = torch.from_numpy(fold.spread(scales_of(powers)))
        return sum(
            every[name] * share * _error(some[name], columns, inputs[name].importance, recipe.format_of(name))
            for name, share in shares.items()
        )

    return scales_of(_descend(error_of))


def _descend(error_of: Callable[[Powers], float]) -> Powers:
    """The powers of least error: one after the other is chosen, until neither finds a better one. Where
    scaling gains nothing, none."""
    at, before = START, None
    while at != before:
        before = at
        at = min(((one, at[1]) for one in POWERS), key=error_of)
        at = min(((at[0], other) for other in POWERS), key=error_of)
    return min((0.0, 0.0), at, key=error_of)


def _logarithm(fold: Fold, squares: "Tensor") -> "Tensor":
    """Of the roots of squares [in], for what is before the fold; on average 0."""
    logarithm = squares.clamp(min=max(float(squares.max()), SMALLEST) * SMALLEST).log().div_(2)
    count, size = fold.heads
    logarithm = logarithm.view(-1, count, size).mean(1).flatten() if count > 1 else logarithm
    return logarithm.sub_(logarithm.mean())


def _error(weight: "Tensor", scales: "Tensor", importance: "Tensor", form: LinearFormat) -> float:
    """What rounding changes in a weight [in, out] whose rows are multiplied by `scales` [in] for it: squares
    weighted by `importance` [in]."""
    from torch.nn.functional import pad

    columns, out = weight.shape
    size = columns if form.group_size == -1 else form.group_size
    short = -columns % size  # of the last group: zeros widen no range
    groups = pad(weight * scales[:, None], (0, 0, 0, short)).view(-1, size, out)
    squares = pad(importance / scales.square(), (0, short)).view(-1, 1, size)
    scale, zero = (x.unsqueeze(1) for x in group_scales(groups, None, form.bits, form.symmetric, False))
    steps = groups.div_(scale)
    off = steps.round().clamp_(-zero, (1 << form.bits) - 1 - zero).sub_(steps).square_()
    return float((squares @ off).mul_(scale.square()).sum())


class ScaledSource:
    """A `ModelSource` with scales folded in: the same function. Tensors are computed when they are asked
    for."""

    def __init__(self, source: ModelSource) -> None:
        self._source = source
        self.spec = source.spec
        self.config = source.config
        self.generation_config = source.generation_config
        self.tokenizer_files = source.tokenizer_files
        self.digest = source.digest
        self.origin = source.origin
        # What each channel of a linear layer's input counts for before scaling, for plain rounding.
        self.importance: dict[str, NDArray[np.float32]] = {}
        self._norms: dict[str, NDArray[np.float32]] = {}
        self._rows: dict[str, NDArray[np.float32]] = {}
        self._columns: dict[str, NDArray[np.float32]] = {}

    def fold(self, layer: int, fold: Fold, scales: NDArray[np.float32]) -> None:
        """Folds scales, of what is before the fold, into a layer; once for each fold."""
        if fold.before in self.spec.norms(layer):
            self._norms[fold.before] = scales
        else:
            (before,) = (x for x in self.spec.linears(layer) if x.name == fold.before)
            self._rows |= dict.fromkeys((before.name, before.bias_name), scales)
        self._columns |= dict.fromkeys(fold.readers, fold.spread(scales))

    def importance_of(self, name: str) -> NDArray[np.float32] | None:
        """What each channel of a linear layer's input counts for, [in]; None where that is not known."""
        own, columns = self.importance.get(name), self._columns.get(name)
        return own if own is None or columns is None else (own / np.square(columns)).astype(np.float32)

    def tensor(self, name: str) -> NDArray[np.float32]:
        """As `ModelSource.tensor`."""
        tensor = self._source.tensor(name)
        if (own := self._norms.get(name)) is not None:
            offset = np.float32(self.spec.norm_offset)
            return (tensor + offset) / own - offset
        if (own := self._rows.get(name)) is not None:
            tensor = (tensor.T / own).T
        if (own := self._columns.get(name)) is not None:
            tensor = tensor * own
        return tensor

    def close(self) -> None:
        self._source.close()
