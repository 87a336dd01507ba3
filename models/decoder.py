"""What the config keys shared by all families mean; a family's file adds what is its own."""

from typing import Any

from ..errors import UnsupportedModelError
from .config_reader import ConfigReader, shown
from .rope import DEFAULT_THETA, rope_from_config
from .spec import Activation, ModelSpec

# transformers' names (`activations.py`); those of a line differ in rounding only.
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "relu": "relu",
}

# Other families' keys that change what is computed, and the values that leave it as it is. A checkpoint that
# sets one under a family that has no such key was meant for other code than transformers'.
FOREIGN_KEYS: dict[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "logit_softcapping": (None,),
    "logits_soft_cap": (None,),
    "query_pre_attn_scalar": (None,),
    "attention_multiplier": (None,),
    "embedding_multiplier": (None, 1),
    "residual_multiplier": (None, 1),
    "logits_scaling": (None, 1),
    "logit_scale": (None, 1),
    "clip_qkv": (None,),
    "alibi": (None, False),
    "attention_chunk_size": (None,),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "no_rope_layers": (None, []),
    "per_layer_config": (None, {}),
    "is_causal": (None, True),
    "use_bidirectional_attention": (None, False),
}

MAX_LAYERS = 4096
MAX_SIZE = 1 << 20  # hidden and intermediate sizes, in elements
MAX_VOCAB = 1 << 24
MAX_HEADS = 1 << 14
MAX_HEAD_DIM = 1 << 12


def decoder_spec(
    reader: ConfigReader,
    *,
    model_type: str,
    num_layers: int,
    sliding_windows: tuple[int | None, ...],
    default_max_position: int,
    default_kv_heads: int | None = None,
    default_head_dim: int | None = None,
    default_norm_eps: float = 1e-6,
    default_theta: float = DEFAULT_THETA,
    default_tied: bool = False,
    activation_key: str = "hidden_act",
    default_activation: str = "silu",
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    own_keys: tuple[str, ...] = (),
) -> ModelSpec:
    """The spec of a config whose family gives the arguments. The defaults are those of the family's config
    class in transformers; None takes the number of heads, or hidden_size / heads. `own_keys` are those of
    `FOREIGN_KEYS` that the family has; it reads them itself.

    Raises `ModelFormatError` or `UnsupportedModelError`.
    """
    refuse_foreign_keys(reader, model_type, own_keys)
    hidden = reader.integer("hidden_size", high=MAX_SIZE)
    heads = reader.integer("num_attention_heads", high=MAX_HEADS)
    if reader.has("num_key_value_heads") or "num_key_value_heads" not in reader.config:
        kv_heads = reader.integer("num_key_value_heads", default_kv_heads or heads, high=MAX_HEADS)
    else:
        kv_heads = heads
    if heads % kv_heads:
        raise reader.error("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads, {heads}")
    if not reader.has("head_dim") and default_head_dim is None and hidden % heads:
        raise reader.error("hidden_size", hidden, f"a multiple of num_attention_heads, {heads}")
    head_dim = reader.integer(
        "head_dim", default_head_dim or hidden // heads, high=MAX_HEAD_DIM, nullable=True
    )
    max_position = reader.integer("max_position_embeddings", default_max_position)
    activation = reader.string(activation_key, default_activation)
    if activation not in ACTIVATIONS:
        raise reader.unsupported(activation_key, activation, ", ".join(ACTIVATIONS))
    return ModelSpec(
        model_type=model_type,
        vocab_size=reader.integer("vocab_size", high=MAX_VOCAB),
        hidden_size=hidden,
        intermediate_size=reader.integer("intermediate_size", high=MAX_SIZE),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        norm_eps=reader.number("rms_norm_eps", default_norm_eps, high=1.0),
        rope=rope_from_config(reader, head_dim, max_position, default_theta),
        activation=ACTIVATIONS[activation],
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        tied_embeddings=reader.flag("tie_word_embeddings", default_tied),
        sliding_windows=sliding_windows,
    )


def layer_count(reader: ConfigReader) -> int:
    return reader.integer("num_hidden_layers", high=MAX_LAYERS)


def refuse_foreign_keys(reader: ConfigReader, model_type: str, own_keys: tuple[str, ...]) -> None:
    """Raises `UnsupportedModelError` for a key of another family that would change what is computed."""
    for key, neutral in FOREIGN_KEYS.items():
        value = reader.config.get(key)
        if key not in own_keys and value not in neutral:
            raise UnsupportedModelError(
                f"{reader.where}: {key} is {shown(value)}, which the {model_type} family does not have"
            )


def same_window(reader: ConfigReader, layers: int, window: int | None) -> tuple[int | None, ...]:
    """One window, or none, for all layers. transformers' classes of such families ignore `layer_types`, so
    one that disagrees was meant for another class (Ministral's, say)."""
    windows = (window,) * layers
    if reader.has("layer_types") and layer_type_windows(reader, layers, window) != windows:
        kind = "full_attention" if window is None else "sliding_attention"
        raise UnsupportedModelError(
            f"{reader.where}: layer_types mixes kinds of attention; this family has {kind} in every layer"
        )
    return windows


def layer_type_windows(reader: ConfigReader, num_layers: int, window: int | None) -> tuple[int | None, ...]:
    """One entry a layer from `layer_types`; `window` is what "sliding_attention" attends to.

    transformers masks with `key > query - window`: a window of w is w tokens, the query's own included
    (`masking_utils.sliding_window_overlay`), which is `ModelSpec.sliding_windows`' count.
    """
    windows: list[int | None] = []
    for layer, kind in enumerate(reader.strings("layer_types", num_layers)):
        if kind in ("full_attention", "attention"):
            windows.append(None)
        elif kind != "sliding_attention":
            raise reader.unsupported(f"layer_types[{layer}]", kind, "full_attention, sliding_attention")
        elif window is None:
            raise reader.error(f"layer_types[{layer}]", kind, "full_attention, as no sliding window is set")
        else:
            windows.append(window)
    return tuple(windows)
