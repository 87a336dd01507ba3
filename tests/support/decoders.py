"""Decoders for the executors' tests: weights in memory, transformers' logits of them, and batches in shuffled
pages."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from experts import with_fused_experts
from numpy.typing import NDArray

from nybble.export.weights import LogicalTensor
from nybble.models.open import open_source
from nybble.models.spec import ModelSpec, RopeSpec
from nybble.quant.packing import QuantizedTensor, quantize_head
from nybble.quant.packing_rows import MatrixRows
from nybble.quant.recipe import Recipe
from nybble.quant.rtn import quantize_rtn
from nybble.runtime.batch import Batch
from nybble.runtime.executor import Executor, KvDtype

PROMPT, DECODED = 64, 32


@dataclass
class Weights:
    spec: ModelSpec
    tensors: dict[str, LogicalTensor]

    def tensor(self, name: str) -> LogicalTensor:
        return self.tensors[name]

    def matrix(self, name: str) -> MatrixRows | None:
        tensor = self.tensor(name)
        return MatrixRows.of(tensor) if isinstance(tensor, QuantizedTensor) else None


def load(path: Path | str) -> Weights:
    source = open_source(path)
    weights = Weights(source.spec, {name: source.tensor(name) for name in source.spec.tensors()})
    source.close()
    return weights


def read_config(path: Path) -> dict[str, Any]:
    return dict(json.loads((path / "config.json").read_text()))


def quantized(weights: Weights, bits: int, group_size: int, symmetric: bool, permuted: bool) -> Weights:
    """Rounded to nearest, embedding and head in their 8 bits; `permuted` as desc_act leaves it."""
    import torch

    recipe = Recipe(method="rtn", bits=bits, group_size=group_size, symmetric=symmetric, clip_search=False)
    rng = np.random.default_rng(7)
    orders: dict[int, NDArray[np.int32]] = {}
    tensors: dict[str, LogicalTensor] = {}
    for name, tensor in weights.tensors.items():
        assert isinstance(tensor, np.ndarray)
        if name in (weights.spec.embedding_name, weights.spec.head_name):
            tensors[name] = quantize_head(tensor)
        elif name not in weights.spec.float_names:
            columns = tensor.shape[1]
            order = orders.setdefault(columns, rng.permutation(columns).astype(np.int32))
            stored = np.ascontiguousarray(tensor[:, order] if permuted else tensor)
            result = quantize_rtn(torch.from_numpy(stored), recipe, name)
            tensors[name] = replace(result, permutation=order) if permuted else result
        else:
            tensors[name] = tensor
    return Weights(weights.spec, tensors)


def stored(spec: ModelSpec, tensors: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """A model's tensors as its family's checkpoints have them."""
    parts: dict[str, list[NDArray[Any]]] = {}
    for name, rows in spec.stored_rows().items():
        parts.setdefault(rows.name, []).append(tensors[name])
    return {name: np.concatenate(found) for name, found in parts.items()}


def transformers_logits(config: dict[str, Any], weights: Weights, ids: list[int]) -> NDArray[np.float32]:
    """Logits [n, vocab] of transformers' own model in float32, holding the dequantized weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {key: value for key, value in config.items() if key != "model_type"}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(config["model_type"], **settings),
        dtype=torch.float32,
        attn_implementation="eager",
    ).eval()
    plain = {
        name: t.dequantize() if isinstance(t, QuantizedTensor) else t for name, t in weights.tensors.items()
    }
    state = {name: torch.from_numpy(t) for name, t in stored(weights.spec, plain).items()}
    missing, unexpected = model.load_state_dict(with_fused_experts(state), strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    with torch.no_grad():
        return np.asarray(model(torch.tensor([ids])).logits[0].numpy())


class Pages:
    """Tables of shuffled pages for sequences of up to `room` tokens; pages out of the window are unmapped."""

    def __init__(self, spec: ModelSpec, sequences: int, room: int, page_size: int = 16) -> None:
        self.windows = spec.window_groups
        self.page_size, self.width = page_size, -(-room // page_size)
        count = len(self.windows) * sequences * self.width
        self.num_blocks = count + 5
        pages = np.random.default_rng(3).permutation(self.num_blocks)[:count]
        self.table = pages.reshape(len(self.windows), sequences, self.width).astype(np.int32)

    def batch(self, chunks: list[tuple[int, int, list[int]]], logits: str = "all") -> Batch:
        """A step of (sequence, tokens before, new tokens); logits of all new tokens, or of each last."""
        table = self.table[:, [sequence for sequence, _, _ in chunks]].copy()
        slots: list[list[int]] = [[] for _ in self.windows]
        for group, window in enumerate(self.windows):
            for row, (_, past, ids) in enumerate(chunks):
                positions = np.arange(past, past + len(ids))
                pages = table[group, row, positions // self.page_size]
                slots[group] += (pages * self.page_size + positions % self.page_size).tolist()
                if window is not None:
                    table[group, row, : max(0, past + 1 - window) // self.page_size] = -1
        bounds = np.cumsum([0, *(len(ids) for _, _, ids in chunks)])
        rows = np.arange(bounds[-1]) if logits == "all" else bounds[1:] - 1
        return Batch(
            token_ids=np.array([token for _, _, ids in chunks for token in ids], np.int32),
            cu_seqlens=bounds.astype(np.int32),
            past_lens=np.array([past for _, past, _ in chunks], np.int32),
            block_table=table,
            slot_mapping=np.array(slots, np.int32),
            logit_rows=rows.astype(np.int32),
        )


def paged_logits(
    executor: Executor, ids: list[int], prompt: int = PROMPT, kv_dtype: KvDtype = "f32"
) -> NDArray[np.float32]:
    """Logits of every position: the prompt in one chunk, then a token at a time."""
    pages = Pages(executor.spec, 1, len(ids))
    executor.allocate_kv(pages.num_blocks, pages.page_size, kv_dtype)
    parts = [executor.step(pages.batch([(0, 0, ids[:prompt])])).copy()]
    parts += [executor.step(pages.batch([(0, i, [ids[i]])])).copy() for i in range(prompt, len(ids))]
    return np.concatenate(parts)


def log_softmax(x: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = x.astype(np.float64) - x.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def mean_kl(expected: NDArray[np.float32], found: NDArray[np.float32]) -> float:
    """Mean KL divergence of the distributions that logits [n, vocab] stand for, in nats."""
    one, other = log_softmax(expected), log_softmax(found)
    return float((np.exp(one) * (one - other)).sum(-1).mean())


def some_ids(vocab_size: int, count: int = PROMPT + DECODED) -> list[int]:
    return np.random.default_rng(11).integers(3, vocab_size, count).tolist()


SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# Of heads of 16, of which 12 are rotated.
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.5, 2.0, 2.5],
    "long_factor": [1.0, 1.5, 3.0, 8.0, 20.0, 32.0],
}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24}
GEMMA: dict[str, Any] = {"sliding_window": 24, "query_pre_attn_scalar": 20}
# Mixtures of experts: the sizes of the experts, and what else a family has.
MIXTURE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
# Each switch that only one family has.
FAMILY_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "granite": (
        "granite",
        {
            "embedding_multiplier": 6.0,
            "attention_multiplier": 0.4,
            "residual_multiplier": 0.3,
            "logits_scaling": 0.5,
            "tie_word_embeddings": True,
        },
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1]}),
    "smollm3 window": (
        "smollm3",
        {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 24},
    ),
    "olmo2": ("olmo2", {"attention_bias": True, "num_key_value_heads": 1}),
    "olmo2 odd sizes": (
        "olmo2",
        {"hidden_size": 72, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 12},
    ),
    "gemma2": ("gemma2", {**GEMMA, "attn_logit_softcapping": 4.0, "final_logit_softcapping": 5.0}),
    "gemma2 uncapped": ("gemma2", {**GEMMA, "attn_logit_softcapping": None, "tie_word_embeddings": False}),
    "gemma3": ("gemma3_text", {**GEMMA, "num_hidden_layers": 3, "sliding_window_pattern": 3}),
    "gemma3 scaled": (
        "gemma3_text",
        {
            **GEMMA,
            **MIXED,
            "final_logit_softcapping": 5.0,
            "rope_parameters": {
                "full_attention": SCALINGS["linear"],
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "phi3": (
        "phi3",
        {"sliding_window": 24, "rope_parameters": {**DEFAULT_ROPE, "partial_rotary_factor": 0.5}},
    ),
    "phi3 odd sizes": (
        "phi3",
        {
            "hidden_size": 72,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 12,
            "intermediate_size": 92,
            "tie_word_embeddings": True,
        },
    ),
    "phi3 long": ("phi3", {"original_max_position_embeddings": 64, "rope_parameters": LONGROPE}),
    "phi3 short": (
        "phi3",
        {"original_max_position_embeddings": 512, "rope_parameters": {**LONGROPE, "factor": 8.0}},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral window": ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 24}),
    "qwen2_moe": (
        "qwen2_moe",
        {**MIXTURE, "num_experts": 6, "shared_expert_intermediate_size": 80, "num_hidden_layers": 3},
    ),
    "qwen2_moe between MLPs": (
        "qwen2_moe",
        {
            **MIXTURE,
            "num_experts": 4,
            "num_hidden_layers": 4,
            "shared_expert_intermediate_size": 112,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "norm_topk_prob": True,
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": 24,
        },
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {**MIXTURE, "num_experts": 20, "num_experts_per_tok": 4, "norm_topk_prob": True},
    ),
    "qwen3_moe odd sizes": (
        "qwen3_moe",
        {
            "hidden_size": 72,
            "moe_intermediate_size": 40,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "mlp_only_layers": [0],
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama wide heads": ("llama", {"head_dim": 40, "num_key_value_heads": 1}),
    "llama gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama linear": ("llama", {"rope_parameters": SCALINGS["linear"]}),
    "llama llama3": ("llama", {"rope_parameters": SCALINGS["llama3"]}),
    "llama yarn": ("llama", {"rope_parameters": SCALINGS["yarn"]}),
    "mistral window": ("mistral", {"sliding_window": 24}),
    "qwen2": ("qwen2", {}),
    "qwen2 two groups": ("qwen2", {"use_sliding_window": True, "tie_word_embeddings": True, **MIXED}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3 yarn": ("qwen3", {"head_dim": 32, "rope_parameters": SCALINGS["yarn"]}),
    **FAMILY_CASES,
}


def greedy(
    executor: Executor, prompts: list[list[int]], chunk: int, count: int
) -> list[list[NDArray[np.float32]]]:
    """Logits of every greedy choice, [prompt][step], with the prompts in chunks and all in one batch."""
    pages = Pages(executor.spec, len(prompts), max(map(len, prompts)) + count)
    executor.allocate_kv(pages.num_blocks, pages.page_size, "f32")
    texts, done = [list(p) for p in prompts], [0] * len(prompts)
    chosen: list[list[NDArray[np.float32]]] = [[] for _ in prompts]
    while any(len(found) < count for found in chosen):
        active = [i for i, found in enumerate(chosen) if len(found) < count]
        chunks = [(i, done[i], texts[i][done[i] : done[i] + chunk]) for i in active]
        logits = executor.step(pages.batch(chunks, logits="last"))
        for (i, past, ids), row in zip(chunks, logits, strict=True):
            done[i] = past + len(ids)
            if done[i] == len(texts[i]):
                chosen[i].append(row.copy())
                texts[i].append(int(row.argmax()))
    return chosen


# What transformers' llama lacks: partial rotation, soft caps, scales, windows of some layers, odd sizes.
UNUSUAL = ModelSpec(
    model_type="test",
    vocab_size=200,
    hidden_size=48,
    intermediate_size=80,
    num_layers=3,
    num_heads=6,
    num_kv_heads=3,
    head_dim=20,
    max_position=256,
    norm_eps=1e-5,
    rope=RopeSpec(theta=10000.0, rotary_dim=12),
    activation="relu",
    sliding_windows=(9, None, 9),
    attention_softcap=2.5,
    logit_softcap=4.0,
    embedding_scale=3.0,
    attention_scale=0.3,
)
