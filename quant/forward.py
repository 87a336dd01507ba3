"""A decoder's forward pass in torch float32, one layer at a time, over the tensors of a `ModelSpec`.

It is what calibration runs: between the parts of a layer a caller sees the input of the linear layers that
come next and may replace their weights, so that one pass over a layer quantizes it.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from ..models.spec import LinearSpec, ModelSpec, RopeSpec
from .experts import mixture_stages
from .mlp import BeforeLinears, Stage, activate
from .packing_nf4 import AnyQuantized
from .threads import in_parallel

if TYPE_CHECKING:
    from torch import Tensor, dtype

# Sequences at a time: few, so that what a thread has in hand stays in its cache.
BATCH = 2


class TensorProvider(Protocol):
    """A model's tensors by their Hugging Face names; a `ModelSource` is one."""

    @property
    def spec(self) -> ModelSpec: ...

    def tensor(self, name: str) -> "AnyQuantized | NDArray[np.float32]": ...


def to_torch(tensor: "AnyQuantized | NDArray[np.float32] | NDArray[np.float16]") -> "Tensor":
    """The tensor in float32, dequantized if need be, in memory of torch's own (aligned, so that a product's
    bits do not depend on where numpy put it)."""
    import torch

    array = tensor if isinstance(tensor, np.ndarray) else tensor.dequantize()
    own = torch.empty(array.shape, dtype=torch.float32)
    np.copyto(own.numpy(), array)
    return own


def fast_dtype() -> "dtype":
    """What this CPU multiplies fastest of the types that calibration takes: bfloat16 where it has an
    instruction for that, twice as fast, else float32."""
    import torch

    # An older torch does not say what the CPU has.
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return torch.bfloat16 if capabilities.get("avx512_bf16") else torch.float32


def rope_tables(rope: RopeSpec, length: int) -> "tuple[Tensor, Tensor]":
    """Cosines and sines for positions 0 to length - 1, [length, rotary_dim] float32 each, for sequences of
    that length."""
    import torch

    rope = rope.for_context(length)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * torch.from_numpy(rope.inv_freq())
    angles = torch.cat((angles, angles), dim=1)
    return angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor


def embed(spec: ModelSpec, embedding: "Tensor", token_ids: NDArray[np.integer]) -> "Tensor":
    """Hidden states [B, S, hidden] of token ids [B, S], with an embedding [vocab, hidden]."""
    import torch

    hidden = torch.nn.functional.embedding(torch.from_numpy(token_ids.astype(np.int64)), embedding)
    return hidden.mul_(spec.embedding_scale) if spec.embedding_scale != 1 else hidden


def forward_layer(
    spec: ModelSpec,
    layer: int,
    weights: "Mapping[str, Tensor]",
    hidden: "Tensor",
    *,
    batch: int = BATCH,
    before: BeforeLinears | None = None,
) -> None:
    """Runs one layer on `hidden` [B, S, hidden] float32, in place, `batch` sequences at a time in each of
    torch's threads.

    `weights` holds the layer's tensors by name in float32, or those of linear layers outside a mixture in
    another type that they are to be computed in. `before` is called four times: for q, k and v; for
    o; for gate and up; for down. In a layer with a mixture it is called for q, k and v and for o, then as
    `mixture_stages` says.
    """
    for stage in layer_stages(spec, layer, weights, hidden, batch=batch, calibrate=before is not None):
        if before is not None:
            before(stage.linears, stage.inputs)


def layer_stages(
    spec: ModelSpec,
    layer: int,
    weights: "Mapping[str, Tensor]",
    hidden: "Tensor",
    *,
    batch: int = BATCH,
    calibrate: bool = True,
) -> Iterator[Stage]:
    """`forward_layer` in steps: stops before each set of linear layers that share an input. Their weights in
    `weights` may be replaced then; what they are when it goes on is what is computed. Without `calibrate` the
    stages of starved experts have none but their own tokens."""

    q, k, v, o, *mlp = spec.linears(layer)
    norms = spec.layer_norms(layer)
    count, length, _ = hidden.shape
    parts = [slice(i, i + batch) for i in range(0, count, batch)]
    tables = layer_rope_tables(spec, layer, length)

    def stage(linears: tuple[LinearSpec, ...], x: "Tensor", to_residual: bool = False) -> Stage:
        flat = (count * length, -1)
        return Stage(linears, x.view(flat), hidden.view(flat) if to_residual else None)

    def computed(source: "Tensor", size: int, compute: "Callable[[Tensor], Tensor]") -> "Tensor":
        result = hidden.new_empty(count, length, size)

        def one(part: slice) -> None:
            result[part] = compute(source[part])

        in_parallel(one, parts)
        return result

    def add(source: "Tensor", which: LinearSpec, norm_name: str | None) -> None:
        def one(part: slice) -> None:
            hidden[part] += to_stream(spec, weights, source[part], which, norm_name)

        in_parallel(one, parts)

    normed = computed(hidden, spec.hidden_size, lambda x: _norm(spec, x, weights, norms.before_attention))
    yield stage((q, k, v), normed)
    attended = computed(normed, spec.q_size, lambda x: attend(spec, layer, weights, x, tables))
    del normed
    yield stage((o,), attended, norms.after_attention is None)
    add(attended, o, norms.after_attention)
    del attended
    normed = computed(hidden, spec.hidden_size, lambda x: _norm(spec, x, weights, norms.before_mlp))
    if spec.mixture_of(layer) is not None:
        given = yield from mixture_stages(
            spec, layer, weights, normed.view(count * length, -1), calibrate=calibrate
        )
        y = _norm(spec, given.view_as(hidden), weights, norms.after_mlp)
        hidden += y if spec.residual_scale == 1 else y * spec.residual_scale
        return
    gate, up, down = mlp
    yield stage((gate, up), normed)
    inner = computed(normed, spec.intermediate_size, lambda x: gated(spec, layer, weights, x))
    del normed
    yield stage((down,), inner, norms.after_mlp is None)
    add(inner, down, norms.after_mlp)


def layer_output(
    spec: ModelSpec,
    layer: int,
    weights: "Mapping[str, Tensor]",
    hidden: "Tensor",
    tables: "tuple[Tensor, Tensor] | None",
) -> "Tensor":
    """What `forward_layer` computes in a layer without a mixture, as a function that can be differentiated;
    `tables` as from `layer_rope_tables`."""
    norms, linears = spec.layer_norms(layer), spec.linears(layer)
    x = attend(spec, layer, weights, _norm(spec, hidden, weights, norms.before_attention), tables)
    hidden = hidden + to_stream(spec, weights, x, linears[3], norms.after_attention)
    x = gated(spec, layer, weights, _norm(spec, hidden, weights, norms.before_mlp))
    return hidden + to_stream(spec, weights, x, linears[6], norms.after_mlp)


def layer_rope_tables(spec: ModelSpec, layer: int, length: int) -> "tuple[Tensor, Tensor] | None":
    """The layer's `rope_tables`, None where it has no RoPE."""
    rope = spec.rope_index(layer)
    return None if rope is None else rope_tables(spec.ropes[rope], length)


def _norm(spec: ModelSpec, x: "Tensor", weights: "Mapping[str, Tensor]", name: str | None) -> "Tensor":
    return x if name is None else rms_norm(spec, x, weights[name])


def _linear(x: "Tensor", weights: "Mapping[str, Tensor]", which: LinearSpec) -> "Tensor":
    import torch

    weight, bias = weights[which.name], weights[which.bias_name] if which.bias else None
    if weight.dtype == x.dtype:
        return torch.nn.functional.linear(x, weight, bias)
    y = torch.nn.functional.linear(x.to(weight.dtype), weight).to(x.dtype)
    return y if bias is None else y.add_(bias)


def attend(
    spec: ModelSpec,
    layer: int,
    weights: "Mapping[str, Tensor]",
    x: "Tensor",
    tables: "tuple[Tensor, Tensor] | None",
) -> "Tensor":
    """The input of o, [B, S, q_size], from that of q, k and v."""
    q, k, v = spec.linears(layer)[:3]
    q_norm, k_norm = spec.qk_norms(layer)

    def heads(x: "Tensor", norm_name: str | None) -> "Tensor":
        x = x if spec.qk_norm_per_head else _norm(spec, x, weights, norm_name)
        x = x.view(*x.shape[:2], -1, spec.head_dim)
        x = _norm(spec, x, weights, norm_name) if spec.qk_norm_per_head else x
        return x.transpose(1, 2) if tables is None else rotate(x.transpose(1, 2), tables)

    values = _linear(x, weights, v).view(*x.shape[:2], -1, spec.head_dim).transpose(1, 2)
    queries, keys = heads(_linear(x, weights, q), q_norm), heads(_linear(x, weights, k), k_norm)
    return attention(spec, layer, queries, keys, values).transpose(1, 2).flatten(2)


def gated(spec: ModelSpec, layer: int, weights: "Mapping[str, Tensor]", x: "Tensor") -> "Tensor":
    """The input of down, [B, S, intermediate], from that of gate and up."""
    gate, up = spec.linears(layer)[4:6]
    return activate(_linear(x, weights, gate), spec.activation) * _linear(x, weights, up)


def to_stream(
    spec: ModelSpec, weights: "Mapping[str, Tensor]", x: "Tensor", which: LinearSpec, norm_name: str | None
) -> "Tensor":
    """What o or down adds to the residual stream."""
    y = _norm(spec, _linear(x, weights, which), weights, norm_name)
    return y if spec.residual_scale == 1 else y * spec.residual_scale


def rms_norm(spec: ModelSpec, x: "Tensor", weight: "Tensor") -> "Tensor":
    """RMSNorm over the last dimension with one of the model's weights."""
    import torch

    weight = weight + spec.norm_offset if spec.norm_offset else weight
    return torch.nn.functional.rms_norm(x, weight.shape, weight, spec.norm_eps)


def rotate(x: "Tensor", tables: "tuple[Tensor, Tensor]") -> "Tensor":
    """RoPE on the first rotary_dim elements of heads [B, heads, S, head_dim]."""
    import torch

    cos, sin = tables
    size = cos.shape[1]
    turned, rest = x[..., :size], x[..., size:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def attention(spec: ModelSpec, layer: int, q: "Tensor", k: "Tensor", v: "Tensor") -> "Tensor":
    """Causal attention over q [B, heads, S, head_dim] and k, v [B, kv_heads, S, head_dim], within the
    layer's sliding window."""
    import torch

    k, v = (x.repeat_interleave(spec.num_heads // spec.num_kv_heads, dim=1) for x in (k, v))
    length, scale, cap = q.shape[2], spec.softmax_scale, spec.attention_softcap
    window = spec.sliding_windows[layer] if spec.sliding_windows else None
    if cap is None and (window is None or window >= length):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    visible = torch.ones(length, length, dtype=torch.bool).tril()
    if window is not None:
        visible = visible.triu(1 - window)
    if cap is None:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)
    scores = cap * torch.tanh(q @ k.transpose(-1, -2) * (scale / cap))
    return scores.masked_fill(~visible, float("-inf")).softmax(dim=-1) @ v


def head_logits(spec: ModelSpec, norm: "Tensor", head: "Tensor", hidden: "Tensor") -> "Tensor":
    """Logits [B, S, vocab] float32 of the last layer's output [B, S, hidden], with the final norm's weight
    and the head [vocab, hidden]."""
    import torch

    logits = rms_norm(spec, hidden, norm) @ head.T
    if spec.logit_scale != 1:
        logits.mul_(spec.logit_scale)
    if spec.logit_softcap is not None:
        logits = torch.tanh_(logits.div_(spec.logit_softcap))
        # In place only where the tangent's value is not needed on the way back.
        scale = torch.mul if torch.is_grad_enabled() else torch.Tensor.mul_
        logits = scale(logits, spec.logit_softcap)
    return logits


def logits(provider: TensorProvider, token_ids: NDArray[np.integer], *, batch: int = BATCH) -> "Tensor":
    """Logits [B, S, vocab] float32 of token ids [B, S]: each layer's tensors are read, used for all
    sequences and released."""
    import torch

    spec = provider.spec
    with torch.no_grad():
        embedding = to_torch(provider.tensor(spec.embedding_name))
        hidden = embed(spec, embedding, token_ids)
        for layer in range(spec.num_layers):
            weights = {name: to_torch(provider.tensor(name)) for name in spec.layer_tensors(layer)}
            forward_layer(spec, layer, weights, hidden, batch=batch)
        head = embedding if spec.tied_embeddings else to_torch(provider.tensor(spec.head_name))
        return head_logits(spec, to_torch(provider.tensor(spec.final_norm_name)), head, hidden)
