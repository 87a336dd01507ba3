"""`ModelSpec`: everything an exporter or executor must know about a decoder, and nothing about files."""

import math
from collections.abc import Sequence
from dataclasses import replace
from decimal import Context, Decimal
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..records import dataclass

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
# Where a layer's norms stand: on what attention and MLP read, on what they give, or on both.
NormPlacement = Literal["before", "after", "around"]
# Whose names a mixture's tensors have: Mixtral's (`block_sparse_moe.experts.0.w1`) or Qwen's.
MixtureNames = Literal["mixtral", "qwen"]


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding over the first `rotary_dim` elements of a head, in the half-split layout
    of Hugging Face: element i is rotated with element i + rotary_dim / 2.

    `scaling` follows transformers' `rope_type`: "none", "linear", "llama3", "yarn", "longrope". The last has
    two sets of frequencies, for sequences of up to `original_max_position` tokens and for longer ones:
    `for_context` chooses.
    """

    theta: float
    rotary_dim: int
    scaling: Literal["none", "linear", "llama3", "yarn", "longrope"] = "none"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    attention_factor: float = 1.0  # yarn, longrope: multiplies cos and sin; resolved at import
    # longrope: what divides each frequency, [rotary_dim / 2] numbers, and which of the two does.
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    long: bool = False

    def for_context(self, context: int) -> "RopeSpec":
        """This embedding for sequences of up to `context` tokens. A choice is made once, for all of them:
        what a position's keys hold must not depend on what follows."""
        if self.scaling != "longrope":
            return self
        return replace(self, long=context > self.original_max_position)

    def inv_freq(self) -> NDArray[np.float32]:
        """Radians per position for each rotated pair, [rotary_dim / 2] float32.

        Sources: https://arxiv.org/abs/2104.09864, https://arxiv.org/abs/2309.00071 (yarn),
        https://arxiv.org/abs/2402.13753 (longrope) and Llama 3.1's published scaling.
        """
        exponents = np.arange(0, self.rotary_dim, 2, dtype=np.float32) / np.float32(self.rotary_dim)
        # In decimal: numpy's power has other last bits on other CPUs.
        theta, context = Decimal(float(np.float32(self.theta))), Context(prec=30)
        powers = np.array([float(context.power(theta, Decimal(float(x)))) for x in exponents], np.float32)
        if self.scaling == "longrope":
            powers *= np.array(self.long_factor if self.long else self.short_factor, np.float32)
        base: NDArray[np.float32] = np.float32(1) / powers
        if self.scaling == "linear":
            base = base / np.float32(self.factor)
        elif self.scaling == "llama3":
            base = self._llama3(base)
        elif self.scaling == "yarn":
            base = self._yarn(base)
        return base.astype(np.float32)

    def _llama3(self, base: NDArray[np.float32]) -> NDArray[np.float32]:
        wavelength = 2 * math.pi / base
        low = self.original_max_position / self.low_freq_factor
        high = self.original_max_position / self.high_freq_factor
        span = self.high_freq_factor - self.low_freq_factor
        smooth = (self.original_max_position / wavelength - self.low_freq_factor) / span
        blended = (1 - smooth) * base / self.factor + smooth * base
        scaled = np.where(wavelength > low, base / self.factor, blended)
        return np.where(wavelength < high, base, scaled).astype(np.float32)

    def _yarn(self, base: NDArray[np.float32]) -> NDArray[np.float32]:
        def dimension(rotations: float) -> float:
            turns = self.original_max_position / (rotations * 2 * math.pi)
            return self.rotary_dim * math.log(turns) / (2 * math.log(self.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0.0), min(high, self.rotary_dim - 1.0)
        if low == high:
            high += 0.001
        ramp = np.clip((np.arange(self.rotary_dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
        blended: NDArray[np.float32] = (base / self.factor * ramp + base * (1 - ramp)).astype(np.float32)
        return blended


@dataclass(frozen=True)
class LinearSpec:
    """One linear layer `y = x Wᵀ + b`: its weight's name, and sizes in elements. The bias, where there is
    one, has the same name with `.weight` replaced by `.bias`."""

    name: str
    out_features: int
    in_features: int
    bias: bool

    @property
    def bias_name(self) -> str:
        return self.name.removesuffix(".weight") + ".bias"


class StoredLinear(NamedTuple):
    """A linear layer as the checkpoint has it, and those of the model whose rows it holds, in order: itself,
    or those that a family fuses."""

    linear: LinearSpec
    parts: tuple[LinearSpec, ...]


class StoredRows(NamedTuple):
    """Rows `begin` to `end` of a tensor of the checkpoint."""

    name: str
    begin: int
    end: int


@dataclass(frozen=True)
class MixtureSpec:
    """The mixture of experts that some layers have for an MLP. A router, a matrix [num_experts, hidden] of
    floats, gives each token a logit for every expert. Its `experts_per_token` experts with the highest logits
    compute, of equal ones those of the lowest index; what they give is weighted with the softmax over all
    logits, divided by the sum over the chosen ones where `normalized`, and added in the experts' order.

    A shared expert computes for every token, weighted with the sigmoid of a gate, [1, hidden] floats, and is
    added last.
    """

    layers: tuple[int, ...]  # ascending; the others have an MLP
    num_experts: int
    experts_per_token: int
    intermediate_size: int  # of each expert
    normalized: bool
    shared_intermediate_size: int = 0  # 0 is no shared expert
    names: MixtureNames = "qwen"

    def prefix(self, layer_prefix: str) -> str:
        """What the names of a layer's mixture begin with."""
        return layer_prefix + ("block_sparse_moe." if self.names == "mixtral" else "mlp.")

    def linears(self, layer_prefix: str, hidden: int) -> tuple[LinearSpec, ...]:
        """Gate, up and down of each expert in ascending order, then of the shared expert."""
        p = self.prefix(layer_prefix)
        names = ("w1", "w3", "w2") if self.names == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        stems = [(f"{p}experts.{expert}.", self.intermediate_size) for expert in range(self.num_experts)]
        if self.shared_intermediate_size:
            stems.append((f"{p}shared_expert.", self.shared_intermediate_size))
        gate, up, down = names
        return tuple(
            linear
            for stem, inner in stems
            for linear in (
                LinearSpec(f"{stem}{gate}.weight", inner, hidden, False),
                LinearSpec(f"{stem}{up}.weight", inner, hidden, False),
                LinearSpec(f"{stem}{down}.weight", hidden, inner, False),
            )
        )

    def gates(self, layer_prefix: str, hidden: int) -> dict[str, tuple[int, int]]:
        """The router, then the shared expert's gate: name to shape. Both stay floats."""
        p = self.prefix(layer_prefix)
        shapes = {f"{p}gate.weight": (self.num_experts, hidden)}
        if self.shared_intermediate_size:
            shapes[f"{p}shared_expert_gate.weight"] = (1, hidden)
        return shapes


class LayerNorms(NamedTuple):
    """A layer's norms by the names of their weights; None where there is none."""

    before_attention: str | None
    after_attention: str | None
    before_mlp: str | None
    after_mlp: str | None


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer: RMSNorm, grouped-query attention with RoPE, gated MLP or mixture of them.

    What multiplies or is added is said here and done where the model runs, never folded into tensors: these
    are the checkpoint's own, in whatever form it quantized them.

    Tensor names are Hugging Face's (`model.layers.0.self_attn.q_proj.weight`); a source with other names
    maps them at import. Weights are [out_features, in_features]. A family that fuses linear layers has the
    parts under these names; `stored_linears` says how its checkpoints hold them.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float
    rope: RopeSpec
    activation: Activation = "silu"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm on q and k, before RoPE
    qk_norm_per_head: bool = True  # over head_dim; else over all heads of a token together
    tied_embeddings: bool = False
    # One entry a layer: how many tokens it attends to, itself included; None is all of them.
    sliding_windows: tuple[int | None, ...] = ()
    attention_softcap: float | None = None  # scores become cap * tanh(scores / cap)
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    attention_scale: float | None = None  # None is head_dim ** -0.5
    norm_placement: NormPlacement = "before"
    norm_offset: float = 0.0  # added to the weights of all norms
    residual_scale: float = 1.0  # multiplies what attention and MLP give
    logit_scale: float = 1.0  # multiplies the head's output, before its soft cap
    window_rope: RopeSpec | None = None  # of layers with a sliding window, where it is another
    unrotated_layers: tuple[int, ...] = ()  # layers without RoPE
    fused_projections: bool = False  # in a checkpoint q, k, v are one tensor, and so are gate and up
    mixture: MixtureSpec | None = None  # what stands for the MLP in some layers

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def window_groups(self) -> tuple[int | None, ...]:
        """The distinct windows in order of first use; G of the executor contract is their number."""
        return tuple(dict.fromkeys(self.sliding_windows))

    @property
    def group_of_layer(self) -> tuple[int, ...]:
        """The window group of each layer: a row of the contract's block table."""
        groups = self.window_groups
        return tuple(map(groups.index, self.sliding_windows)) or (0,) * self.num_layers

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The different rotary embeddings."""
        return (self.rope,) if self.window_rope is None else (self.rope, self.window_rope)

    def for_context(self, context: int) -> "ModelSpec":
        """The model that runs with sequences of up to `context` tokens: its rotary embeddings are chosen."""
        window_rope = self.window_rope and self.window_rope.for_context(context)
        return replace(self, rope=self.rope.for_context(context), window_rope=window_rope)

    def rope_index(self, layer: int) -> int | None:
        """Which of `ropes` a layer has; None where it has none."""
        if layer in self.unrotated_layers:
            return None
        windowed = bool(self.sliding_windows) and self.sliding_windows[layer] is not None
        return 1 if windowed and self.window_rope is not None else 0

    @property
    def embedding_name(self) -> str:
        return "model.embed_tokens.weight"

    @property
    def head_name(self) -> str:
        """The tensor the head multiplies with: the embedding when tied."""
        return self.embedding_name if self.tied_embeddings else "lm_head.weight"

    @property
    def final_norm_name(self) -> str:
        return "model.norm.weight"

    def layer_prefix(self, layer: int) -> str:
        return f"model.layers.{layer}."

    def mixture_of(self, layer: int) -> MixtureSpec | None:
        """The mixture of experts of a layer; None where it has an MLP."""
        return self.mixture if self.mixture is not None and layer in self.mixture.layers else None

    @property
    def mlp_size(self) -> int:
        """Elements of an MLP's activations; 0 where every layer has a mixture of experts."""
        mixtures = 0 if self.mixture is None else len(self.mixture.layers)
        return self.intermediate_size if mixtures < self.num_layers else 0

    def linears(self, layer: int) -> tuple[LinearSpec, ...]:
        """The layer's linear layers that are quantized, in the order data meets them: q, k, v, o, then gate,
        up and down: of the MLP, or of one expert after the other."""
        p, hidden, inner = self.layer_prefix(layer), self.hidden_size, self.intermediate_size
        attention = (
            LinearSpec(p + "self_attn.q_proj.weight", self.q_size, hidden, self.qkv_bias),
            LinearSpec(p + "self_attn.k_proj.weight", self.kv_size, hidden, self.qkv_bias),
            LinearSpec(p + "self_attn.v_proj.weight", self.kv_size, hidden, self.qkv_bias),
            LinearSpec(p + "self_attn.o_proj.weight", hidden, self.q_size, self.output_bias),
        )
        if (mixture := self.mixture_of(layer)) is not None:
            return attention + mixture.linears(p, hidden)
        return (
            *attention,
            LinearSpec(p + "mlp.gate_proj.weight", inner, hidden, self.mlp_bias),
            LinearSpec(p + "mlp.up_proj.weight", inner, hidden, self.mlp_bias),
            LinearSpec(p + "mlp.down_proj.weight", hidden, inner, self.mlp_bias),
        )

    def stored_linears(self, layer: int) -> tuple[StoredLinear, ...]:
        """The layer's linear layers as a checkpoint has them, in the order data meets them."""
        linears = self.linears(layer)
        if not self.fused_projections:
            return tuple(StoredLinear(linear, (linear,)) for linear in linears)
        q, k, v, o, gate, up, down = linears
        p = self.layer_prefix(layer)

        def fused(name: str, *parts: LinearSpec) -> StoredLinear:
            rows = sum(part.out_features for part in parts)
            return StoredLinear(LinearSpec(p + name, rows, parts[0].in_features, parts[0].bias), parts)

        return (
            fused("self_attn.qkv_proj.weight", q, k, v),
            StoredLinear(o, (o,)),
            fused("mlp.gate_up_proj.weight", gate, up),
            StoredLinear(down, (down,)),
        )

    def expert_names(self, layer: int) -> tuple[str, ...]:
        """The names of the layer's linear layers that are an expert's of which tokens choose some, three for
        each in ascending order."""
        mixture = self.mixture_of(layer)
        if mixture is None:
            return ()
        return tuple(linear.name for linear in self.linears(layer)[4 : 4 + 3 * mixture.num_experts])

    def active_linears(self, layer: int) -> tuple[LinearSpec, ...]:
        """Those of `linears` that a token goes through: of a mixture's experts as many as it chooses, for
        which the first ones stand."""
        linears, mixture = self.linears(layer), self.mixture_of(layer)
        if mixture is None:
            return linears
        return linears[: 4 + 3 * mixture.experts_per_token] + linears[4 + 3 * mixture.num_experts :]

    def gates(self, layer: int) -> dict[str, tuple[int, int]]:
        """The matrices of a layer that stay floats: the router of its mixture of experts and the shared
        expert's gate, where it has them. Name to shape."""
        mixture = self.mixture_of(layer)
        return {} if mixture is None else mixture.gates(self.layer_prefix(layer), self.hidden_size)

    @cached_property
    def float_names(self) -> frozenset[str]:
        """The tensors that are never quantized: norms, biases, gates."""
        matrices = {linear.name for layer in range(self.num_layers) for linear in self.linears(layer)}
        matrices |= {self.embedding_name, self.head_name}
        return frozenset(name for name in self.tensors() if name not in matrices)

    def layer_norms(self, layer: int) -> LayerNorms:
        """The layer's norms around attention and MLP."""
        names: dict[NormPlacement, tuple[str | None, ...]] = {
            "before": ("input", None, "post_attention", None),
            "after": (None, "post_attention", None, "post_feedforward"),
            "around": ("input", "post_attention", "pre_feedforward", "post_feedforward"),
        }
        p = self.layer_prefix(layer)
        return LayerNorms(*(name and f"{p}{name}_layernorm.weight" for name in names[self.norm_placement]))

    def qk_norms(self, layer: int) -> tuple[str | None, str | None]:
        """The norms on q and k by the names of their weights; None where there are none."""
        p = self.layer_prefix(layer) + "self_attn."
        return (p + "q_norm.weight", p + "k_norm.weight") if self.qk_norm else (None, None)

    def norms(self, layer: int) -> dict[str, int]:
        """The layer's norm weights: name to length."""
        first, *others = self.layer_norms(layer)
        q, k = self.qk_norms(layer)
        q_size, k_size = (self.head_dim,) * 2 if self.qk_norm_per_head else (self.q_size, self.kv_size)
        sizes = {first: self.hidden_size, q: q_size, k: k_size} | dict.fromkeys(others, self.hidden_size)
        return {name: size for name, size in sizes.items() if name is not None}

    def layer_tensors(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Every tensor of one layer: name to shape."""
        return self._with_norms(layer, self.linears(layer))

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the model: name to shape. The head is absent when tied."""
        return self._with_ends([self.layer_tensors(layer) for layer in range(self.num_layers)])

    def stored_tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of an unquantized checkpoint: name to shape. The head is absent when tied."""
        return self._with_ends(
            [
                self._with_norms(layer, [stored.linear for stored in self.stored_linears(layer)])
                for layer in range(self.num_layers)
            ]
        )

    def stored_rows(self) -> dict[str, StoredRows]:
        """Where a checkpoint holds each tensor of the model."""
        found = {name: StoredRows(name, 0, shape[0]) for name, shape in self.tensors().items()}
        for layer in range(self.num_layers):
            for stored, parts in self.stored_linears(layer):
                row = 0
                for part in parts:
                    end = row + part.out_features
                    found[part.name] = StoredRows(stored.name, row, end)
                    if part.bias:
                        found[part.bias_name] = StoredRows(stored.bias_name, row, end)
                    row = end
        return found

    def _with_norms(self, layer: int, linears: Sequence[LinearSpec]) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {n: (size,) for n, size in self.norms(layer).items()}
        shapes |= self.gates(layer)
        for linear in linears:
            shapes[linear.name] = (linear.out_features, linear.in_features)
            if linear.bias:
                shapes[linear.bias_name] = (linear.out_features,)
        return shapes

    def _with_ends(self, layers: Sequence[dict[str, tuple[int, ...]]]) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {self.embedding_name: (self.vocab_size, self.hidden_size)}
        for layer in layers:
            shapes |= layer
        shapes[self.final_norm_name] = (self.hidden_size,)
        if not self.tied_embeddings:
            shapes[self.head_name] = (self.vocab_size, self.hidden_size)
        return shapes
