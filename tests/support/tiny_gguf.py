"""Metadata and tensors of a small model, as a GGUF file has them."""

from typing import Any

import numpy as np

HIDDEN, INNER, HEADS, KV_HEADS, HEAD, LAYERS = 32, 64, 4, 2, 8, 2


def tokenizer(count: int = 260) -> dict[str, Any]:
    from tokenizers import pre_tokenizers

    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "<|eos|>", "<|eot|>", "<|bos|>"]
    tokens += [f"<unused{n}>" for n in range(count - len(tokens))]
    types = [1] * 257 + [3] * (len(tokens) - 257)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 259,
        "tokenizer.ggml.eos_token_id": 257,
    }


def tiny(arch: str = "llama", **changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metadata and tensors of a small model; `changes` replace or add metadata (None removes), with "__" for
    dots after the architecture."""
    sizes = {
        "block_count": LAYERS,
        "context_length": 128,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    }
    metadata = {f"{arch}.{key}": value for key, value in sizes.items()} | tokenizer()
    metadata |= {f"{arch}.{key.replace('__', '.')}": value for key, value in changes.items()}
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (260, HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "output.weight": (260, HIDDEN),
    }
    for layer in range(LAYERS):
        rows = {"attn_q": HEADS * HEAD, "attn_k": KV_HEADS * HEAD, "attn_v": KV_HEADS * HEAD}
        for name, size in (rows | {"attn_output": HIDDEN, "ffn_gate": INNER, "ffn_up": INNER}).items():
            shapes[f"blk.{layer}.{name}.weight"] = (size, HIDDEN)
        shapes[f"blk.{layer}.ffn_down.weight"] = (HIDDEN, INNER)
        shapes |= {f"blk.{layer}.{name}.weight": (HIDDEN,) for name in ("attn_norm", "ffn_norm")}
    generator = np.random.default_rng(5)
    return metadata, {
        name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()
    }
