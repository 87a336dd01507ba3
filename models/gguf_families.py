"""What is its own of each architecture in GGUF files: tensor names, how converters change tensors, and the
metadata that becomes keys of `config.json`.

The facts are those of llama.cpp: its converter from Hugging Face folders, and what it takes for granted where
a file doesn't say.
"""

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

from ..records import dataclass
from .gguf_metadata import Metadata

_ATTENTION = {f"self_attn.{x}_proj": f"attn_{x}" for x in ("q", "k", "v")} | {
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
_MLP = {f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")}
_NORMS_BEFORE = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
_NORMS_AFTER = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_NORMS_AROUND = {"input_layernorm": "attn_norm", "pre_feedforward_layernorm": "ffn_norm", **_NORMS_AFTER}

# Adds to a config that has the sizes what the metadata says beside them.
AddKeys = Callable[[Metadata, dict[str, Any]], None]


@dataclass(frozen=True)
class GgufFamily:
    """An architecture that is run.

    `norms` are the layer's norms, by their Hugging Face name. `interleaved`: the rows of each head of q and k
    are in rotated pairs. `norm_offset` was added to every norm's weight. `own_keys` are metadata that other
    architectures must not have.
    """

    architecture: str  # transformers' class
    model_type: str
    norms: Mapping[str, str] = field(default_factory=lambda: _NORMS_BEFORE)
    interleaved: bool = False
    norm_offset: float = 0.0
    activation: tuple[str, str] = ("hidden_act", "silu")
    biases: tuple[str, ...] = ("attention_bias",)  # keys of the config that say which there are
    own_keys: tuple[str, ...] = ()
    add_keys: AddKeys = lambda meta, config: None

    @property
    def layer_names(self) -> Mapping[str, str]:
        """A layer's modules: their names in the file by their Hugging Face names."""
        return {**_ATTENTION, **_MLP, **self.norms}


def _gemma2(meta: Metadata, config: dict[str, Any]) -> None:
    # The file doesn't say what scores are scaled with. The 27B model, known by its layers, has its own.
    whole = config["num_hidden_layers"] == 46
    config |= {
        "query_pre_attn_scalar": _head_of(config) if whole else config["head_dim"],
        "sliding_window": meta.integer("gemma2.attention.sliding_window", 4096),
        "attn_logit_softcapping": meta.number("gemma2.attn_logit_softcapping", 50.0),
        "final_logit_softcapping": meta.number("gemma2.final_logit_softcapping", 30.0),
    }


def _gemma3(meta: Metadata, config: dict[str, Any]) -> None:
    whole = config["num_hidden_layers"] == 62
    config |= {
        "query_pre_attn_scalar": _head_of(config) if whole else config["head_dim"],
        "sliding_window": meta.integer("gemma3.attention.sliding_window"),
        "sliding_window_pattern": meta.integer("gemma3.attention.sliding_window_pattern", 6),
        "rope_local_base_freq": meta.number("gemma3.rope.freq_base_swa", 10000.0),
    }
    cap = meta.number("gemma3.final_logit_softcapping", 0.0)
    if cap != 0:
        config["final_logit_softcapping"] = cap


def _granite(meta: Metadata, config: dict[str, Any]) -> None:
    def factor(name: str, absent: float) -> float:
        return meta.number(f"granite.{name}", 0.0) or absent

    config |= {
        "attention_multiplier": factor("attention.scale", config["head_dim"] ** -0.5),
        "embedding_multiplier": factor("embedding_scale", 1.0),
        "residual_multiplier": factor("residual_scale", 1.0),
        "logits_scaling": factor("logit_scale", 1.0),
    }


def _smollm3(meta: Metadata, config: dict[str, Any]) -> None:
    config["no_rope_layer_interval"] = 4


def _head_of(config: Mapping[str, Any]) -> int:
    return int(config["hidden_size"] // config["num_attention_heads"])


_WITH_MLP = ("attention_bias", "mlp_bias")
_GELU = ("hidden_activation", "gelu_pytorch_tanh")

FAMILIES: Mapping[str, GgufFamily] = {
    "llama": GgufFamily("LlamaForCausalLM", "llama", interleaved=True, biases=_WITH_MLP),
    "qwen2": GgufFamily("Qwen2ForCausalLM", "qwen2", biases=()),
    "qwen3": GgufFamily("Qwen3ForCausalLM", "qwen3"),
    "gemma2": GgufFamily(
        "Gemma2ForCausalLM",
        "gemma2",
        norms=_NORMS_AROUND,
        norm_offset=1.0,
        activation=_GELU,
        own_keys=("attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping"),
        add_keys=_gemma2,
    ),
    "gemma3": GgufFamily(
        "Gemma3ForCausalLM",
        "gemma3_text",
        norms=_NORMS_AROUND,
        norm_offset=1.0,
        activation=_GELU,
        own_keys=("attention.sliding_window", "final_logit_softcapping"),
        add_keys=_gemma3,
    ),
    "granite": GgufFamily(
        "GraniteForCausalLM",
        "granite",
        interleaved=True,
        biases=_WITH_MLP,
        own_keys=("attention.scale", "logit_scale", "embedding_scale", "residual_scale"),
        add_keys=_granite,
    ),
    "smollm3": GgufFamily(
        "SmolLM3ForCausalLM", "smollm3", interleaved=True, biases=_WITH_MLP, add_keys=_smollm3
    ),
    "olmo2": GgufFamily("Olmo2ForCausalLM", "olmo2", norms=_NORMS_AFTER),
}
