"""GGUF files of small models, converted as llama.cpp converts them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

# The published names on both sides, written out apart from the importer's table.
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# Where an architecture has other norms, by the names that they have in it.
NORMS_AFTER = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
NORMS = {
    "gemma2": {"pre_feedforward_layernorm": "ffn_norm", **NORMS_AFTER},
    "gemma3": {"pre_feedforward_layernorm": "ffn_norm", **NORMS_AFTER},
    "olmo2": NORMS_AFTER,
}
# Rows of q and k are interleaved.
INTERLEAVED = ("llama", "granite", "smollm3")


def converted(name: str, values: NDArray[Any], arch: str, head_dim: int) -> NDArray[Any]:
    """A Hugging Face tensor's values as they are in the file."""
    if arch in INTERLEAVED and ("q_proj" in name or "k_proj" in name):
        return interleaved(values, head_dim)
    if arch.startswith("gemma") and name.endswith("norm.weight"):
        return values + 1
    return values


def write_gguf(folder: Path, path: Path, type_of: Callable[[str], str]) -> Path:
    """A llama or qwen2 with its tokenizer, from a Hugging Face folder; `type_of` names a matrix's ggml type
    by its Hugging Face name."""
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize
    from safetensors.numpy import load_file

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    arch, head_dim = config["model_type"], config["head_dim"]
    writer = GGUFWriter(path, arch)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    _add_tokenizer(writer, folder)
    for name, values in load_file(folder / "model.safetensors").items():
        if config["tie_word_embeddings"] and name.startswith("lm_head"):
            continue
        values = converted(name, values, arch, head_dim)
        if values.ndim == 1:
            writer.add_tensor(to_gguf_name(name), values)
        else:
            kind = GGMLQuantizationType[type_of(name)]
            writer.add_tensor(to_gguf_name(name), quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def to_gguf_name(name: str, arch: str = "llama") -> str:
    stem, kind = name.rsplit(".", 1)
    if not stem.startswith("model.layers."):
        return f"{NAMES[stem]}.{kind}"
    layer, module = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{NORMS.get(arch, NAMES).get(module) or NAMES[module]}.{kind}"


def interleaved(values: NDArray[Any], head_dim: int) -> NDArray[Any]:
    """Row 2i of a head in the file is its row i, row 2i + 1 its row i + head_dim / 2: where llama.cpp's
    rotation expects pairs."""
    order = []
    for head in range(0, len(values), head_dim):
        for index in range(head_dim // 2):
            order += [head + index, head + index + head_dim // 2]
    return values[order]


def _add_tokenizer(writer: Any, folder: Path) -> None:
    document = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = document["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    special = {token["content"]: token["id"] for token in document["added_tokens"]}
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in document["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_chat_template((folder / "chat_template.jinja").read_text(encoding="utf-8"))
