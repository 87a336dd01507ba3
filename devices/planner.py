"""Whether a model fits, before anything is loaded: bytes for each thing that will be held.

For `CpuExecutor` they follow from its layouts (runtime/kernels/layout.h). For `OrtExecutor` on a CPU they are
built from what ONNX Runtime 1.32 was seen to hold; the constants below say how. For a GPU's own memory they
count weights, cache and activations, and have not been measured.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from ..errors import DoesNotFitError, SettingError
from ..models.spec import LinearSpec, ModelSpec
from ..quant.recipe import Recipe
from .profile import DeviceProfile, KvDtype
from .sizes import format_bytes

Half = Literal["onnx", "gptq"]
ExecutorKind = Literal["cpu", "ort"]

KV_BYTES: dict[KvDtype, int] = {"f32": 4, "f16": 2, "int8": 1}
# The embedding and head of a quantized model, as quant.packing defines them.
HEAD_BITS, HEAD_GROUP_SIZE = 8, 32

# Resident after importing what a run needs: interpreter, numpy, tokenizers, jinja2 (43 MB), onnx-ir (45 MB),
# onnxruntime (20 MB). CPython 3.11, Linux x86-64.
IMPORTS = 110_000_000
# The same without ONNX, for `CpuExecutor`: interpreter, numpy, tokenizers, jinja2, the kernels.
CPU_IMPORTS = 48_000_000
KERNEL_PAGE = 16  # tokens of its pages, whatever the profile has
# Repacking the head, which comes first, holds it this many times over: in f16, as integers, as tiles.
LOADING_COPIES = 4
# What a session holds besides weights, and library pages touched by the first run: 44 MB for 30 layers.
SESSION, SESSION_PER_LAYER = 20_000_000, 900_000
# A tokenizer's tables: 31 MB for 49,152 tokens.
TOKENIZER_PER_TOKEN = 650
# The arena's rounding: it held 1.2 to 1.4 times what the largest tensors of a step come to.
ARENA = 1.35
# Graphs run at most this many tokens at once (runtime/ort_runs.py).
RUN_TOKENS = 512


@dataclass(frozen=True)
class MemoryPlan:
    """What a run will hold, in bytes. `total` is the peak, to be compared with `budget`."""

    context: int  # tokens of one sequence
    sequences: int
    kv_dtype: KvDtype
    page_size: int
    num_pages: int
    weights: int  # as they lie in the file or in arrays: the parts that stay resident
    packed: int  # ONNX Runtime's own rearranged copy of the quantized weights
    kv: int
    activations: int
    runtime: int  # interpreter, libraries, session, tokenizer
    loading: int  # held only while loading: the matrix that is being packed, in its old form
    budget: int | None

    @property
    def total(self) -> int:
        """Bytes at the peak: of loading or of running, whichever is more."""
        fixed = self.runtime + self.weights + self.packed
        return fixed + max(self.loading, self.kv + self.activations)

    @property
    def fits(self) -> bool:
        return self.budget is None or self.total <= self.budget


def weight_bytes(spec: ModelSpec, recipe: Recipe | None) -> int:
    """Bytes of a model's tensors once each: packed integers, zero points, scales, norms and biases in f16,
    embedding and head in 8 bits. `recipe` None is an unquantized model in float32."""
    if recipe is None:
        return 4 * sum(math.prod(shape) for shape in spec.tensors().values())
    matrices = [_Matrix.of(linear, recipe) for linear in _linears(spec)]
    matrices += [_head(spec)] * (1 if spec.tied_embeddings else 2)
    return sum(m.data + 2 * m.scales + m.zeros for m in matrices) + 2 * _float_elements(spec)


def kv_bytes_per_token(spec: ModelSpec, kv_dtype: KvDtype) -> int:
    """Bytes of one token's keys and values in all layers; int8 has a float32 scale per token and head."""
    head = spec.head_dim * KV_BYTES[kv_dtype] + (4 if kv_dtype == "int8" else 0)
    return 2 * spec.num_layers * spec.num_kv_heads * head


def plan_memory(
    spec: ModelSpec,
    recipe: Recipe | None,
    profile: DeviceProfile,
    *,
    context: int | None = None,
    sequences: int = 1,
    kv_dtype: KvDtype | None = None,
    half: Half = "onnx",
    token_budget: int | None = None,
    budget: int | None = None,
    executor: ExecutorKind = "ort",
) -> MemoryPlan:
    """What running a model under a profile holds, with `sequences` of up to `context` tokens each at once.

    None takes the profile's value; `context` None is the model's own where that is shorter. `recipe` None is
    an unquantized model. `half` is what the artifact is read from: `OrtExecutor` maps the ONNX half's weights
    and holds the GPTQ half's in memory as well; for `CpuExecutor` it makes no difference. Raises
    `SettingError`.
    """
    length = min(spec.max_position, profile.context) if context is None else context
    if not 1 <= length <= spec.max_position:
        raise SettingError(f"context is {length}; expected 1 to {spec.max_position}, the model's own context")
    if sequences < 1:
        raise SettingError(f"sequences is {sequences}; expected at least 1")
    kind = profile.kv_dtype if kv_dtype is None else kv_dtype
    pages = -(-length // profile.page_size) * sequences
    plan = MemoryPlan(
        context=length,
        sequences=sequences,
        kv_dtype=kind,
        page_size=profile.page_size,
        num_pages=pages,
        weights=weight_bytes(spec, recipe),
        packed=0,
        kv=pages * profile.page_size * kv_bytes_per_token(spec, kind),
        activations=_activations(spec, length, sequences, kind, token_budget or profile.token_budget),
        runtime=0,
        loading=0,
        budget=profile.memory_budget if budget is None else budget,
    )
    if executor == "cpu":
        return _on_kernels(plan, spec, recipe, token_budget or profile.token_budget)
    return plan if profile.memory_kind == "gpu" else _on_cpu(plan, spec, recipe, half)


def check_fit(
    spec: ModelSpec,
    recipe: Recipe | None,
    profile: DeviceProfile,
    *,
    context: int | None = None,
    sequences: int = 1,
    kv_dtype: KvDtype | None = None,
    half: Half = "onnx",
    token_budget: int | None = None,
    budget: int | None = None,
    executor: ExecutorKind = "ort",
) -> MemoryPlan:
    """`plan_memory`'s plan, if it keeps to the budget. Raises `DoesNotFitError` with the numbers and what
    would fit, `SettingError` for a setting out of range."""
    plan = partial(
        plan_memory,
        spec,
        recipe,
        profile,
        kv_dtype=kv_dtype,
        half=half,
        token_budget=token_budget,
        budget=budget,
        executor=executor,
    )
    asked = plan(context=context, sequences=sequences)
    if asked.fits:
        return asked
    raise DoesNotFitError(f"the model {describe_need(asked)}; {_advice(plan, asked)}")


def fit_sequences(
    spec: ModelSpec,
    recipe: Recipe | None,
    profile: DeviceProfile,
    *,
    max_sequences: int,
    context: int | None = None,
    kv_dtype: KvDtype | None = None,
    half: Half = "onnx",
    token_budget: int | None = None,
    budget: int | None = None,
    executor: ExecutorKind = "ort",
) -> MemoryPlan:
    """The plan for as many sequences of `context` tokens as fit, `max_sequences` at most. Raises as
    `check_fit` does where not even one fits."""
    if max_sequences < 1:
        raise SettingError(f"max_sequences is {max_sequences}; expected at least 1")
    plan = partial(
        check_fit,
        spec,
        recipe,
        profile,
        context=context,
        kv_dtype=kv_dtype,
        half=half,
        token_budget=token_budget,
        budget=budget,
        executor=executor,
    )
    best, low, high = plan(sequences=1), 1, max_sequences + 1
    while high - low > 1:
        middle = (low + high) // 2
        try:
            best, low = plan(sequences=middle), middle
        except DoesNotFitError:
            high = middle
    return best


def describe_need(plan: MemoryPlan) -> str:
    """One line with the numbers: the peak, its parts and the budget."""
    budget = "no budget" if plan.budget is None else f"the memory budget is {format_bytes(plan.budget)}"
    parts = [f"weights {format_bytes(plan.weights + plan.packed)}"]
    if plan.packed:
        parts[0] += f" ({format_bytes(plan.packed)} of it ONNX Runtime's packed copy)"
    together = f"{plan.sequences} x {plan.context}" if plan.sequences > 1 else f"{plan.context}"
    parts += [
        f"KV cache {format_bytes(plan.kv)} for {together} tokens in {plan.kv_dtype}",
        f"activations {format_bytes(plan.activations)}",
    ]
    if plan.runtime:
        parts.append(f"interpreter and libraries {format_bytes(plan.runtime)}")
    return f"needs {format_bytes(plan.total)}, {budget}: " + ", ".join(parts)


def _advice(plan: "partial[MemoryPlan]", asked: MemoryPlan) -> str:
    """The longest context that fits, with one sequence if need be, or that none does."""
    for together in sorted({asked.sequences, 1}, reverse=True):
        low, high = 0, asked.context  # high does not fit, unless fewer sequences make it
        if plan(context=high, sequences=together).fits:
            low = high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if plan(context=middle, sequences=together).fits else (low, middle)
        if low:
            beside = "" if together == asked.sequences else ", one sequence at a time"
            return f"a context of {low} tokens{beside} would fit"
    least = plan(context=1, sequences=1)
    return f"no context would fit, since one token needs {format_bytes(least.total)}"


def _on_cpu(plan: MemoryPlan, spec: ModelSpec, recipe: Recipe | None, half: Half) -> MemoryPlan:
    """What `MatMulNBits` on the CPU provider was seen to hold: every matrix packed into private memory with
    its float32 scales and as many sums. Of the mapped file the integers are given back, the scales stay, and
    so does the embedding, which is read by row and shared with a tied head. Float matrices are packed too.
    """
    floats = 4 * _float_elements(spec)
    if recipe is None:
        sizes = [4 * w.out_features * w.in_features for w in _linears(spec)]
        head_size = 4 * spec.vocab_size * spec.hidden_size
        packed, mapped = sum(sizes) + head_size, head_size + floats
        given = mapped + sum(sizes) + (0 if spec.tied_embeddings else head_size)
        loading = max(head_size, 2 * max(sizes))
    else:
        head, matrices = _head(spec), [_Matrix.of(linear, recipe) for linear in _linears(spec)]
        multiplied = [*matrices, head]
        packed = sum(m.data + 8 * m.scales for m in multiplied)
        mapped = sum(4 * m.scales + m.zeros for m in matrices) + head.data + 4 * head.scales + floats
        mapped += 0 if spec.tied_embeddings else 4 * head.scales
        given = mapped + sum(m.data for m in (matrices if spec.tied_embeddings else multiplied))
        loading = max(head.data, 2 * max(m.data for m in matrices))  # gate and up are one operator
    runtime = IMPORTS + SESSION + SESSION_PER_LAYER * spec.num_layers + TOKENIZER_PER_TOKEN * spec.vocab_size
    # Unpacking a GPTQ half leaves freed heap behind, about a largest matrix of it.
    weights = mapped if half == "onnx" else given + loading
    return replace(plan, weights=weights, packed=packed, loading=loading, runtime=runtime)


def _on_kernels(plan: MemoryPlan, spec: ModelSpec, recipe: Recipe | None, tokens: int) -> MemoryPlan:
    """What `CpuExecutor` holds: tiles of 16 rows by 32 inputs (runtime/kernels/layout.h), norms and biases in
    float32, pages, the buffers of one step. Loading repacks one matrix at a time; the head is the largest.
    """
    if recipe is None:
        raise SettingError("executor is 'cpu', which runs quantized models only; use 'ort'")
    head = _tile_bytes(spec.vocab_size, spec.hidden_size, HEAD_BITS, HEAD_GROUP_SIZE, True)
    heads = 1 if spec.tied_embeddings else 2
    weights = heads * head + 4 * _float_elements(spec)
    for linear in _linears(spec):
        weights += _tile_bytes(
            linear.out_features, linear.in_features, recipe.bits, recipe.group_size, recipe.symmetric
        )
        weights += 4 * linear.in_features if recipe.desc_act else 0
    widest = max(spec.hidden_size, spec.q_size, spec.intermediate_size)
    wide = max(spec.hidden_size, spec.q_size + 2 * spec.kv_size, 2 * spec.intermediate_size)
    row = 4 * (spec.hidden_size + widest + wide + spec.q_size) + 3 * widest * 5 // 4
    pages = -(-plan.context // KERNEL_PAGE) * plan.sequences
    return replace(
        plan,
        page_size=KERNEL_PAGE,
        num_pages=pages,
        weights=weights,
        packed=0,
        kv=pages * _page_bytes(spec, plan.kv_dtype),
        activations=tokens * row + 4 * spec.vocab_size * plan.sequences,
        runtime=CPU_IMPORTS + TOKENIZER_PER_TOKEN * spec.vocab_size,
        loading=max(0, (LOADING_COPIES + heads - 1) * head - weights),
    )


def _tile_bytes(rows: int, columns: int, bits: int, group_size: int, symmetric: bool) -> int:
    """A matrix in tiles: every group of a tile has 16 f16 scales, and 16 zero points unless symmetric."""
    slices = -(-columns // 32)
    groups = 1 if group_size == -1 else -(-columns // group_size)
    return -(-rows // 16) * (groups * (32 if symmetric else 48) + slices * 64 * bits)


def _page_bytes(spec: ModelSpec, kv_dtype: KvDtype) -> int:
    """A page of `CpuExecutor` in all layers: values padded to 16 elements, heads to 64 bytes."""
    elements = KERNEL_PAGE * (spec.head_dim + -(-spec.head_dim // 16) * 16)
    head = elements * KV_BYTES[kv_dtype] + (2 * KERNEL_PAGE * 4 if kv_dtype == "int8" else 0)
    return spec.num_layers * spec.num_kv_heads * (-(-head // 64) * 64)


def _activations(spec: ModelSpec, context: int, sequences: int, kv_dtype: KvDtype, tokens: int) -> int:
    """The largest tensors alive in one step, float32: of a prefill chunk at the end of a context, or of a
    decode of all sequences, whichever is more."""
    chunk = min(tokens, context, RUN_TOKENS)
    steps = [_step(spec, context, 1, chunk, kv_dtype), _step(spec, context, sequences, 1, kv_dtype)]
    return int(ARENA * max(steps)) + 4 * spec.vocab_size * sequences


def _step(spec: ModelSpec, context: int, sequences: int, tokens: int, kv_dtype: KvDtype) -> int:
    """One layer of one run: `sequences` of `tokens` new tokens each, at the end of their contexts."""
    scores = spec.num_heads * tokens * context * 4
    mask = tokens * context * 5  # booleans, and what they add to the scores
    # Keys and values gathered from their pages, converted, and repeated for each query head.
    gathered = 2 * context * (4 * (spec.kv_size + spec.q_size))
    if kv_dtype != "f32":
        gathered += 2 * context * spec.kv_size * KV_BYTES[kv_dtype]
    rows = 3 * spec.intermediate_size + 4 * spec.hidden_size + 2 * (spec.q_size + 2 * spec.kv_size)
    return sequences * (scores + mask + gathered + 4 * tokens * rows)


@dataclass(frozen=True)
class _Matrix:
    """A quantized matrix's bytes and counts, as `MatMulNBits` stores it."""

    data: int  # bytes of integers
    scales: int  # their number
    zeros: int  # bytes of zero points

    @classmethod
    def of(cls, linear: LinearSpec, recipe: Recipe) -> "_Matrix":
        return cls.sized(
            linear.out_features, linear.in_features, recipe.bits, recipe.group_size, recipe.symmetric
        )

    @classmethod
    def sized(cls, rows: int, columns: int, bits: int, group_size: int, symmetric: bool) -> "_Matrix":
        # One group per row is written as blocks of 128 with a repeated scale.
        block = 128 if group_size == -1 else group_size
        blocks = -(-columns // block)
        zeros = 0 if symmetric else rows * -(-blocks * bits // 8)
        return cls(rows * blocks * (block * bits // 8), rows * blocks, zeros)


def _head(spec: ModelSpec) -> _Matrix:
    return _Matrix.sized(spec.vocab_size, spec.hidden_size, HEAD_BITS, HEAD_GROUP_SIZE, True)


def _linears(spec: ModelSpec) -> Iterator[LinearSpec]:
    for layer in range(spec.num_layers):
        yield from spec.linears(layer)


def _float_elements(spec: ModelSpec) -> int:
    """Of norms and biases."""
    return sum(shape[0] for shape in spec.tensors().values() if len(shape) == 1)
