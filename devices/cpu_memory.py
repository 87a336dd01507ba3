"""What `CpuExecutor` holds: it follows from its layouts (runtime/kernels/layout.h), and from what a step
writes (runtime/kernels/step_buffers.h)."""

from ..models.spec import ModelSpec
from .memory_plan import (
    GGUF_PER_TOKEN,
    GGUF_TOKENIZING_PER_TOKEN,
    TOKENIZER_PER_TOKEN,
    TOKENIZING_PER_TOKEN,
    MemoryPlan,
    RunSettings,
)
from .model_bytes import HEAD_BITS, HEAD_GROUP_SIZE, INTEGER_KV, KV_BYTES, kv_bytes_per_token
from .packed_sizes import packed_bytes, padded, tile_bytes
from .profile import KvDtype
from .residency import ResidencyPlan

# Resident after importing what a run needs: interpreter, numpy, tokenizers, jinja2, the kernels. CPython
# 3.11, Linux x86-64: 37 to 48 MB on two machines, since the system decides how much of a library's
# code around what is used is mapped as well.
IMPORTS = 46_000_000
PAGE = 16  # tokens of its pages, whatever the profile has
# A piece of a matrix while it is packed, in its old form and as tiles.
LOADING_PIECE = 8_000_000
# Choosing a token of a row: numpy's arrays, or those of the kernels in the engine's thread and two of a
# step's.
SAMPLING_PER_TOKEN = 48
# The kernels' in another thread of a step (runtime/kernels/token_sampler.h).
SAMPLER_PER_TOKEN = 16
# Of each thread at least: a panel of unpacked weights and its results.
PANEL = 256 * 1024
# Quantized activations of four tokens and 32 inputs (runtime/kernels/layout.h).
ACTIVATION = 224
# Rows of the head whose halves lie together.
HEAD_BLOCK = 64


def plan_on_kernels(run: RunSettings) -> MemoryPlan:
    """The tiles of all matrices that stay in memory, norms and biases in float32, the buffers that the others
    pass through, pages, the buffers of one step. Raises `SettingError` for an unquantized model."""
    spec = run.spec
    residency = run.residency or ResidencyPlan(spec.num_layers)
    sizes = packed_bytes(spec, run.recipe, run.linear_bytes)
    streamed, by_use = set(residency.streamed_layers), residency.expert_slots > 0
    resident = [layer for number, layer in enumerate(sizes.layers) if number not in streamed]
    sections = [layer.read(by_use) for layer in sizes.layers]
    partly = [layer for n, layer in enumerate(sizes.layers) if n in streamed or (by_use and layer.experts)]
    rows = min(HEAD_BLOCK, padded(spec.vocab_size, 16))
    head_block = tile_bytes(rows, spec.hidden_size, HEAD_BITS, HEAD_GROUP_SIZE, True)
    pages = -(-run.length // PAGE) * run.sequences
    page = _page_bytes(spec, run.kv)
    tokenizer, tokenizing = TOKENIZER_PER_TOKEN, TOKENIZING_PER_TOKEN
    if run.half == "gguf":
        tokenizer, tokenizing = TOKENIZER_PER_TOKEN + GGUF_PER_TOKEN, GGUF_TOKENIZING_PER_TOKEN
    return MemoryPlan(
        context=run.length,
        sequences=run.sequences,
        kv_dtype=run.kv,
        page_size=PAGE,
        num_pages=pages,
        token_budget=run.tokens,
        residency=residency,
        linears=sum(layer.linears - (layer.experts if by_use else 0) for layer in resident),
        ends=0 if residency.streamed_head else sizes.ends,
        # Those of streamed layers are copied when the file is opened, and so are their permutations.
        norms=sum(layer.vectors for layer in sizes.layers)
        + sum(layer.permutations for layer in partly)
        + sizes.last_norm,
        buffers=residency.stream_buffer_bytes(sections, head_block)
        + residency.expert_slot_bytes(sizes.largest_expert),
        packed=0,
        kv_token=kv_bytes_per_token(spec, run.kv),
        kv=pages * page,
        activations=step_bytes(run)
        + 4 * padded(spec.vocab_size, 16) * run.logit_rows
        + (
            SAMPLING_PER_TOKEN
            + SAMPLER_PER_TOKEN * max(0, min(run.threads or run.profile.threads, run.sequences) - 2)
        )
        * spec.vocab_size,
        tokenizer=tokenizer * spec.vocab_size,
        interpreter=IMPORTS,
        tokenizing=tokenizing * spec.vocab_size,
        loading=LOADING_PIECE,
        budget=run.profile.memory_budget if run.budget is None else run.budget,
    )


def step_bytes(run: RunSettings) -> int:
    """Everything a step writes besides cache and logits. Rows that no step comes to are never resident."""
    spec, tokens, rows = run.spec, padded(run.reached_tokens, 4), padded(run.logit_rows, 4)
    hidden, inner = padded(spec.hidden_size, 32), padded(spec.mlp_size, 32)
    q, kv = padded(spec.q_size, 32), padded(spec.kv_size, 32)
    widest, wide = max(hidden, inner, q, *_expert_sizes(spec)), max(hidden, q + 2 * kv, 2 * inner)
    rotary = sum(rope.rotary_dim for rope in spec.ropes)
    # Of a search for the highest logit: the quantized row, what is unknown of it by group and by slice.
    streamed = run.residency is not None and run.residency.streamed_head
    search = 0 if streamed or spec.logit_softcap else hidden // 32 * (ACTIVATION + 4 + 16)
    # Rows in float32, three times as int8 with 24 bytes more for 32 of them, the rotary tables, positions.
    token = 4 * (hidden + wide + q) + 3 * _quantized(widest) + 4 * rotary + 8
    return (
        tokens * token
        + _expert_rows(spec, tokens)
        + rows * (4 * hidden + _quantized(hidden))
        + (run.threads or run.profile.threads)
        * (_scratch(spec, widest) + _copies(hidden, max(hidden, q)) + search)
        + _parts(run)
    )


def _expert_sizes(spec: ModelSpec) -> tuple[int, int]:
    """Elements of an expert's activations and of the shared one's, padded; 0 for none."""
    mixture = spec.mixture
    if mixture is None:
        return 0, 0
    return padded(mixture.intermediate_size, 32), padded(mixture.shared_intermediate_size, 32)


def _expert_rows(spec: ModelSpec, tokens: int) -> int:
    """What `ExpertRows` (runtime/kernels/experts.h) holds: outputs and quantized inputs of a row for every
    token and expert of it, filled up to blocks of four for each expert, and who has which."""
    if (mixture := spec.mixture) is None:
        return 0
    hidden, chosen = padded(spec.hidden_size, 32), tokens * mixture.experts_per_token
    routed = padded(chosen + 3 * min(chosen, mixture.num_experts), 4)
    sizes, shared = _expert_sizes(spec), tokens if mixture.shared_intermediate_size else 0
    count = mixture.experts_per_token + (shared > 0)
    found = 4 * tokens * (padded(mixture.num_experts, 16) + 3 * count) + 4 * (routed + shared)
    for rows, size in zip((routed, shared), sizes, strict=True):
        found += rows * (4 * max(hidden, 2 * size) + _quantized(max(hidden, size)))
    return found


def _scratch(spec: ModelSpec, widest: int) -> int:
    """Of one thread: the attention's arrays (`AttentionScratch`) or a panel, and two rows."""
    width, group = padded(spec.head_dim, 16), spec.num_heads // spec.num_kv_heads
    rows, stride = max(192, group), padded(spec.head_dim, 4)
    # Scores, values of a segment and merged; chunks of keys and values; figures of rows and their queries.
    arrays = [4 * rows * 256, 4 * rows * width, 4 * rows * width, 4 * 64 * width, 4 * 64 * width]
    arrays += [4 * rows] * 6 + [8 * rows]
    # For a cache in integers: queries, weights, their scales, sums, pairs of values.
    arrays += [2 * rows * stride, 4 * rows, 2 * rows * 256, 4 * 256, 4 * rows * width, 4 * 32 * width]
    attention = sum(padded(array, 64) for array in arrays)
    return padded(max(attention, PANEL), 4096) + 8 * widest


def _copies(hidden: int, columns: int) -> int:
    """Of one thread, for steps of one token: its residual, and inputs of linear layers."""
    return 4 * hidden + 3 * padded(columns // 32 * ACTIVATION, 64)


def _parts(run: RunSettings) -> int:
    """What the segments of decodes at the end of their contexts leave to be merged."""
    spec = run.spec
    segments = -(-run.length // 256)
    return run.sequences * segments * spec.num_heads * (8 + 4 * padded(spec.head_dim, 16))


def _quantized(columns: int) -> int:
    return columns * ACTIVATION // (4 * 32)


def _page_bytes(spec: ModelSpec, kv_dtype: KvDtype) -> int:
    """A page of `CpuExecutor` in all layers: values padded to 16 elements, keys in integers to 4 bytes,
    heads to 64."""
    together = 4 // KV_BYTES[kv_dtype] if kv_dtype in INTEGER_KV else 1
    keys = padded(spec.head_dim, together)
    elements = PAGE * (keys + -(-spec.head_dim // 16) * 16)
    head = elements * KV_BYTES[kv_dtype] + (2 * PAGE * 4 if kv_dtype in INTEGER_KV else 0)
    return spec.num_layers * spec.num_kv_heads * (-(-head // 64) * 64)
