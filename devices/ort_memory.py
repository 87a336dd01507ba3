"""What `OrtExecutor` holds, built from what ONNX Runtime 1.32 was seen to hold on a CPU: the constants say
how. For a GPU's own memory weights, cache and activations are counted, and have not been measured."""

from dataclasses import replace
from typing import NamedTuple

from .memory_plan import TOKENIZER_PER_TOKEN, MemoryPlan, RunSettings
from .model_bytes import (
    KV_BYTES,
    Matrix,
    float_elements,
    head_matrix,
    kv_bytes_per_token,
    linears,
    weight_bytes,
)
from .residency import ResidencyPlan

# Resident after importing what a run needs: interpreter, numpy, tokenizers, jinja2 (43 MB), onnx-ir (45 MB),
# onnxruntime (20 MB). CPython 3.11, Linux x86-64.
IMPORTS = 110_000_000
# What a session holds besides weights, and library pages touched by the first run: 44 MB for 30 layers.
SESSION, SESSION_PER_LAYER = 20_000_000, 900_000
# The arena's rounding: it held 1.2 to 1.4 times what the largest tensors of a step come to.
ARENA = 1.35
# Graphs run at most this many tokens at once (runtime/ort_runs.py).
RUN_TOKENS = 512


def plan_on_ort(run: RunSettings) -> MemoryPlan:
    """A plan for ONNX Runtime, on the profile's GPU or CPU."""
    pages = -(-run.length // run.profile.page_size) * run.sequences
    kinds = _Kinds.of(weight_bytes(run.spec, run.recipe), run)
    plan = MemoryPlan(
        context=run.length,
        sequences=run.sequences,
        kv_dtype=run.kv,
        page_size=run.profile.page_size,
        num_pages=pages,
        token_budget=run.tokens,
        residency=ResidencyPlan(run.spec.num_layers),
        linears=kinds.linears,
        ends=kinds.ends,
        norms=kinds.norms,
        buffers=0,
        packed=0,
        kv_token=kv_bytes_per_token(run.spec, run.kv),
        kv=pages * run.profile.page_size * kv_bytes_per_token(run.spec, run.kv),
        activations=_activations(run),
        tokenizer=0,
        interpreter=0,
        tokenizing=0,
        loading=0,
        budget=run.profile.memory_budget if run.budget is None else run.budget,
    )
    return plan if run.profile.memory_kind == "gpu" else _on_cpu(plan, run)


def _on_cpu(plan: MemoryPlan, run: RunSettings) -> MemoryPlan:
    """What `MatMulNBits` on the CPU provider was seen to hold: every matrix packed into private memory with
    its float32 scales and as many sums. Of the mapped file the integers are given back, the scales stay, and
    so does the embedding, which is read by row and shared with a tied head. Float matrices are packed too;
    those in NF4 are not: `MatMulBnb4` reads them from the file in every run.
    """
    spec, recipe = run.spec, run.recipe
    floats = 4 * float_elements(spec)
    if recipe is None:
        sizes = [4 * w.out_features * w.in_features for w in linears(spec)]
        head_size = 4 * spec.vocab_size * spec.hidden_size
        packed, mapped = sum(sizes) + head_size, head_size + floats
        given = mapped + sum(sizes) + (0 if spec.tied_embeddings else head_size)
        loading = max(head_size, 2 * max(sizes))
    else:
        head, matrices = head_matrix(spec), [Matrix.of(linear, recipe) for linear in linears(spec)]
        multiplied = [*matrices, head]
        packed = sum(m.data + 8 * m.scales for m in multiplied)
        mapped = sum(4 * m.scales + m.zeros for m in matrices) + head.data + 4 * head.scales + floats
        mapped += 0 if spec.tied_embeddings else 4 * head.scales
        given = mapped + sum(m.data for m in (matrices if spec.tied_embeddings else multiplied))
        loading = max(head.data, 2 * max(m.data for m in matrices))  # gate and up are one operator
        if recipe.method == "nf4":
            packed = head.data + 8 * head.scales
            mapped += sum(m.data for m in matrices)
    session = IMPORTS + SESSION + SESSION_PER_LAYER * spec.num_layers
    # Unpacking a checkpoint leaves freed heap behind, about a largest matrix of it.
    weights = mapped if run.half == "onnx" else given + loading
    kinds = _Kinds.of(weights, run)
    return replace(
        plan,
        linears=kinds.linears,
        ends=kinds.ends,
        norms=kinds.norms,
        packed=packed,
        loading=loading,
        tokenizer=TOKENIZER_PER_TOKEN * spec.vocab_size,
        interpreter=session,
    )


class _Kinds(NamedTuple):
    """A model's weights by kind, in bytes."""

    linears: int
    ends: int
    norms: int

    @classmethod
    def of(cls, weights: int, run: RunSettings) -> "_Kinds":
        """Of so many bytes: what is neither embedding, head, norm nor bias is linear layers."""
        spec, head = run.spec, head_matrix(run.spec)
        matrix, width = head.data + 2 * head.scales, 2
        if run.recipe is None:
            matrix, width = 4 * spec.vocab_size * spec.hidden_size, 4
        ends, norms = matrix * (1 if spec.tied_embeddings else 2), width * float_elements(spec)
        return cls(weights - ends - norms, ends, norms)


def _activations(run: RunSettings) -> int:
    """The largest tensors alive in one step, float32: of a prefill chunk at the end of a context, or of a
    decode of all sequences, whichever is more; and the logits."""
    chunk = min(run.tokens, run.length, RUN_TOKENS)
    steps = [_step(run, 1, chunk), _step(run, run.sequences, 1)]
    largest = max(steps)
    if run.recipe is not None and run.recipe.method == "nf4":  # one operator's weights at a time, as floats
        largest += 4 * 2 * run.spec.intermediate_size * run.spec.hidden_size
    return int(ARENA * largest) + 4 * run.spec.vocab_size * run.logit_rows


def _step(run: RunSettings, sequences: int, tokens: int) -> int:
    """One layer of one run: `sequences` of `tokens` new tokens each, at the end of their contexts."""
    spec, context = run.spec, run.length
    scores = spec.num_heads * tokens * context * 4
    mask = tokens * context * 5  # booleans, and what they add to the scores
    # Keys and values gathered from their pages, converted, and repeated for each query head.
    gathered = 2 * context * (4 * (spec.kv_size + spec.q_size))
    if run.kv != "f32":
        gathered += 2 * context * spec.kv_size * KV_BYTES[run.kv]
    rows = 3 * spec.mlp_size + 4 * spec.hidden_size + 2 * (spec.q_size + 2 * spec.kv_size)
    if (mixture := spec.mixture) is not None:
        # Rows sorted by expert, what all experts gave, and that sorted back and weighted.
        one = 3 * mixture.intermediate_size + 5 * spec.hidden_size
        rows += mixture.experts_per_token * one + 3 * mixture.shared_intermediate_size
    return sequences * (scores + mask + gathered + 4 * tokens * rows)
