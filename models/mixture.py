"""What the config keys of mixtures of experts mean; a family's file says which it has."""

from .config_reader import ConfigReader
from .decoder import MAX_SIZE
from .spec import MixtureNames, MixtureSpec

MAX_EXPERTS = 1024  # of a layer
MAX_ALL_EXPERTS = 1 << 16  # of all layers: each has three matrices with names of their own


def mixture_spec(
    reader: ConfigReader,
    layers: tuple[int, ...],
    *,
    names: MixtureNames,
    keys: tuple[str, ...],
    default_experts: int,
    default_per_token: int,
    intermediate_size: int,
    normalized: bool,
    shared_intermediate_size: int = 0,
) -> MixtureSpec | None:
    """The mixture that `layers` have; None for none. `keys` are the names for the number of experts that the
    family's config class knows. Raises `ModelFormatError` for counts out of range."""
    experts_key = experts_key_of(reader, keys)
    experts = reader.integer(experts_key, default_experts, high=MAX_EXPERTS)
    per_token = reader.integer("num_experts_per_tok", default_per_token, high=MAX_EXPERTS)
    if per_token > experts:
        raise reader.error("num_experts_per_tok", per_token, f"at most {experts_key}, {experts}")
    if len(layers) * experts > MAX_ALL_EXPERTS:
        raise reader.error(experts_key, experts, f"at most {MAX_ALL_EXPERTS} experts in all layers together")
    if not layers:
        return None
    return MixtureSpec(
        layers, experts, per_token, intermediate_size, normalized, shared_intermediate_size, names
    )


def experts_key_of(reader: ConfigReader, keys: tuple[str, ...]) -> str:
    """The first of `keys` that is there; transformers saves under another name than the one that it reads."""
    return next((key for key in keys if reader.has(key)), keys[0])


def qwen_mixture(
    reader: ConfigReader,
    num_layers: int,
    *,
    keys: tuple[str, ...],
    default_experts: int,
    default_per_token: int,
    default_intermediate: int,
    default_shared: int = 0,
) -> MixtureSpec | None:
    """Qwen's: every `decoder_sparse_step`th layer but for `mlp_only_layers`; none where `num_experts` is 0.
    `default_shared` is 0 for a family without a shared expert."""
    step = reader.integer("decoder_sparse_step", 1)
    dense = reader.config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(x) is int and x >= 0 for x in dense):
        raise reader.error("mlp_only_layers", dense, "a list of layers")
    if reader.integer(experts_key_of(reader, keys), default_experts, low=0) == 0:
        return None
    shared = 0
    if default_shared:
        shared = reader.integer("shared_expert_intermediate_size", default_shared, high=MAX_SIZE)
    return mixture_spec(
        reader,
        tuple(layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0),
        names="qwen",
        keys=keys,
        default_experts=default_experts,
        default_per_token=default_per_token,
        intermediate_size=reader.integer("moe_intermediate_size", default_intermediate, high=MAX_SIZE),
        normalized=reader.flag("norm_topk_prob", False),
        shared_intermediate_size=shared,
    )
