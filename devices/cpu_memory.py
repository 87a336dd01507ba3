"""What `CpuExecutor` holds: it follows from its layouts (runtime/kernels/layout.h), and from what a step
writes (runtime/kernels/step_buffers.h)."""

from ..errors import SettingError
from ..models.spec import ModelSpec
from .memory_plan import GGUF_PER_TOKEN, TOKENIZER_PER_TOKEN, MemoryPlan, RunSettings
from .model_bytes import HEAD_BITS, HEAD_GROUP_SIZE, KV_BYTES, float_elements, linears
from .profile import KvDtype

# Resident after importing what a run needs: interpreter, numpy, tokenizers, jinja2, the kernels. CPython
# 3.11, Linux x86-64.
IMPORTS = 48_000_000
PAGE = 16  # tokens of its pages, whatever the profile has
# Repacking the head, which comes first, holds it this many times over: in f16, as integers, as tiles.
LOADING_COPIES = 4
# Choosing a token of a row: some arrays of float64 and int64.
SAMPLING_PER_TOKEN = 48
# Of each thread at least: a panel of unpacked weights and its results.
PANEL = 256 * 1024


def plan_on_kernels(run: RunSettings) -> MemoryPlan:
    """The tiles of all matrices, norms and biases in float32, pages, the buffers of one step. Loading repacks
    one matrix at a time; the head is the largest. Raises `SettingError` for an unquantized model."""
    spec = run.spec
    head = _tile_bytes(spec.vocab_size, spec.hidden_size, HEAD_BITS, HEAD_GROUP_SIZE, True)
    heads = 1 if spec.tied_embeddings else 2
    weights = heads * head + _linear_bytes(run) + 4 * float_elements(spec)
    pages = -(-run.length // PAGE) * run.sequences
    tokenizer = TOKENIZER_PER_TOKEN + (GGUF_PER_TOKEN if run.half == "gguf" else 0)
    return MemoryPlan(
        context=run.length,
        sequences=run.sequences,
        kv_dtype=run.kv,
        page_size=PAGE,
        num_pages=pages,
        weights=weights,
        packed=0,
        kv=pages * _page_bytes(spec, run.kv),
        activations=step_bytes(run)
        + 4 * _padded(spec.vocab_size, 16) * run.logit_rows
        + SAMPLING_PER_TOKEN * spec.vocab_size,
        runtime=IMPORTS + tokenizer * spec.vocab_size,
        loading=max(0, (LOADING_COPIES + heads - 1) * head - weights),
        budget=run.profile.memory_budget if run.budget is None else run.budget,
    )


def step_bytes(run: RunSettings) -> int:
    """Everything a step of `run.tokens` tokens writes besides cache and logits."""
    spec, tokens, rows = run.spec, _padded(run.tokens, 4), _padded(run.logit_rows, 4)
    hidden, inner = _padded(spec.hidden_size, 32), _padded(spec.intermediate_size, 32)
    q, kv = _padded(spec.q_size, 32), _padded(spec.kv_size, 32)
    widest, wide = max(hidden, inner, q), max(hidden, q + 2 * kv, 2 * inner)
    # Rows in float32, three times as int8 with 20 bytes more for 32 of them, the rotary table, positions.
    token = 4 * (hidden + wide + q) + 3 * _quantized(widest) + 4 * spec.rope.rotary_dim + 8
    return (
        tokens * token
        + rows * (4 * hidden + _quantized(hidden))
        + (run.threads or run.profile.threads) * _scratch(spec, widest)
        + _parts(run)
    )


def _scratch(spec: ModelSpec, widest: int) -> int:
    """Of one thread: the attention's arrays (`AttentionScratch`) or a panel, and two rows."""
    padded, group = _padded(spec.head_dim, 16), spec.num_heads // spec.num_kv_heads
    rows, stride = max(192, group), _padded(spec.head_dim, 4)
    # Scores, values of a segment and merged; chunks of keys and values; figures of rows and their queries.
    arrays = [4 * rows * 256, 4 * rows * padded, 4 * rows * padded, 4 * 64 * padded, 4 * 64 * padded]
    arrays += [4 * rows] * 6 + [8 * rows]
    # For an int8 cache: queries, weights, their scales, sums, pairs of values.
    arrays += [rows * stride, 4 * rows, 2 * rows * 256, 4 * 256, 4 * rows * padded, 4 * 32 * padded]
    attention = sum(_padded(array, 64) for array in arrays)
    return _padded(max(attention, PANEL), 4096) + 8 * widest


def _parts(run: RunSettings) -> int:
    """What the segments of decodes at the end of their contexts leave to be merged."""
    spec = run.spec
    segments = -(-run.length // 256)
    return run.sequences * segments * spec.num_heads * (8 + 4 * _padded(spec.head_dim, 16))


def _quantized(columns: int) -> int:
    return columns * 13 // 8  # 208 bytes for four tokens of 32


def _padded(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _linear_bytes(run: RunSettings) -> int:
    """Of all linear layers: tiles, and what they permute their inputs by."""
    if run.linear_bytes is not None:
        return run.linear_bytes
    recipe = run.recipe
    if recipe is None:
        raise SettingError("executor is 'cpu', which runs quantized models only; use 'ort'")
    total = 0
    for linear in linears(run.spec):
        total += _tile_bytes(
            linear.out_features, linear.in_features, recipe.bits, recipe.group_size, recipe.symmetric
        )
        total += 4 * linear.in_features if recipe.desc_act else 0
    return total


def _tile_bytes(rows: int, columns: int, bits: int, group_size: int, symmetric: bool) -> int:
    """A matrix in tiles: every group of a tile has 16 f16 scales, and 16 zero points unless symmetric."""
    slices = -(-columns // 32)
    groups = 1 if group_size == -1 else -(-columns // group_size)
    return -(-rows // 16) * (groups * (32 if symmetric else 48) + slices * 64 * bits)


def _page_bytes(spec: ModelSpec, kv_dtype: KvDtype) -> int:
    """A page of `CpuExecutor` in all layers: values padded to 16 elements, keys in int8 to 4, heads to 64
    bytes."""
    keys = -(-spec.head_dim // 4) * 4 if kv_dtype == "int8" else spec.head_dim
    elements = PAGE * (keys + -(-spec.head_dim // 16) * 16)
    head = elements * KV_BYTES[kv_dtype] + (2 * PAGE * 4 if kv_dtype == "int8" else 0)
    return spec.num_layers * spec.num_kv_heads * (-(-head // 64) * 64)
