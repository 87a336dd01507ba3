"""The one builder of the decoder's graph, from a `ModelSpec` and logical tensors, without tracing.

Inputs, outputs and how a token attends are the attention contract's: `onnx_contract.py`.
"""

import json
from dataclasses import asdict, dataclass

import numpy as np

from ..models.spec import ModelSpec
from .onnx_builder import IR_VERSION, OPSET_IMPORTS, Builder, MemoryStore, TensorStore
from .onnx_contract import AttentionContract, Contract, PagedContract
from .onnx_dependency import ir
from .onnx_experts import write_mixture
from .onnx_genai import GenaiContract
from .onnx_linear import Embedding, LinearWriter, as_float, store_embedding, write_embedding, write_head
from .onnx_mlp import write_mlp
from .onnx_spec import spec_to_json
from .weights import LogicalWeights

FORMAT_VERSION = 1
FREQUENCIES = "inv_freq.{}"  # of each of the spec's rotary embeddings: the name of a constant


def build_decoder(
    weights: LogicalWeights,
    *,
    accuracy_level: int = 4,
    store: TensorStore | None = None,
    contract: Contract = "paged",
) -> ir.Model:
    """The decoder as an ONNX model. Tensors are asked for one layer at a time, in the order data
    meets them, and handed to `store` (default: kept in the model).

    `accuracy_level` 4 rounds activations to int8 per block inside MatMulNBits; 0 keeps them in float32.
    """
    return _Decoder(weights, store or MemoryStore(), accuracy_level, contract).build()


@dataclass
class _Decoder:
    weights: LogicalWeights
    store: TensorStore
    accuracy_level: int
    contract_name: Contract

    def __post_init__(self) -> None:
        self.spec: ModelSpec = self.weights.spec
        self.b = Builder()
        self.writer = LinearWriter(self.b, self.store, self.accuracy_level)
        kind = PagedContract if self.contract_name == "paged" else GenaiContract
        self.contract: AttentionContract = kind(self.b, self.spec)

    def build(self) -> ir.Model:
        contract = self.contract
        self.rotations = self._rotations()
        hidden, embedding = self._embed(contract.token_ids)
        for layer in range(self.spec.num_layers):
            hidden = self._layer(layer, hidden)
        logits = contract.logits(self._logits(hidden, embedding))
        graph = ir.Graph(
            contract.inputs,
            [logits, *contract.outputs],
            nodes=self.b.nodes,
            initializers=list(self.b.initializers.values()),
            opset_imports=OPSET_IMPORTS | {function.domain: 1 for function in contract.functions},
            name="decoder",
        )
        return ir.Model(
            graph,
            ir_version=IR_VERSION,
            producer_name="nybble",
            functions=contract.functions,
            metadata_props=self._metadata(),
        )

    def _metadata(self) -> dict[str, str]:
        return {
            "nybble.format": str(FORMAT_VERSION),
            "nybble.contract": self.contract.name,
            "nybble.spec": spec_to_json(self.spec),
            "nybble.tensors": json.dumps({name: asdict(t) for name, t in self.writer.layout.items()}),
        }

    def _rotations(self) -> list[tuple[ir.Value, ir.Value]]:
        """For each RoPE cos and sin of every token's position, [1, T, rotary_dim / 2] or [B, S,
        rotary_dim / 2]: once a step, for all layers. Where there is a choice by the context, it is that of
        the model's whole one."""
        b, column = self.b, self.contract.positions()
        rotations = []
        for index, rope in enumerate(self.spec.for_context(self.spec.max_position).ropes):
            frequencies = b.op("Constant", value=ir.tensor(rope.inv_freq()))
            frequencies.name = FREQUENCIES.format(index)
            angles = b.op("Mul", column, frequencies)
            cos, sin = b.op("Cos", angles), b.op("Sin", angles)
            if rope.attention_factor != 1.0:
                factor = b.constant(rope.attention_factor, np.float32)
                cos, sin = b.op("Mul", cos, factor), b.op("Mul", sin, factor)
            rotations.append((cos, sin))
        return rotations

    def _embed(self, token_ids: ir.Value) -> tuple[ir.Value, Embedding]:
        spec, b = self.spec, self.b
        tensor = self.weights.tensor(spec.embedding_name)
        hidden, embedding = write_embedding(
            self.writer, spec.embedding_name, tensor, token_ids, spec.hidden_size
        )
        if spec.embedding_scale != 1.0:
            hidden = b.op("Mul", hidden, b.constant(spec.embedding_scale, np.float32))
        return hidden, embedding

    def _norm(self, x: ir.Value, name: str) -> ir.Value:
        """RMSNorm with a weight of the model. What is stored is the weight itself; an offset is added in the
        graph, where ONNX Runtime folds it at load."""
        spec, b = self.spec, self.b
        weight = self.writer.put(name, as_float(self.weights.tensor(name), name))
        if spec.norm_offset:
            weight = b.op("Add", weight, b.constant(spec.norm_offset, np.float32))
        return b.op("RMSNormalization", x, weight, epsilon=spec.norm_eps)

    def _add(self, hidden: ir.Value, y: ir.Value, norm: str | None) -> ir.Value:
        """What attention or MLP gave, normalized where the model does, added to the residual."""
        spec, b = self.spec, self.b
        y = y if norm is None else self._norm(y, norm)
        if spec.residual_scale != 1.0:
            y = b.op("Mul", y, b.constant(spec.residual_scale, np.float32))
        return b.op("Add", hidden, y)

    def _layer(self, layer: int, hidden: ir.Value) -> ir.Value:
        spec, prefix = self.spec, self.spec.layer_prefix(layer)
        linears = spec.linears(layer)
        qkv, output, mlp = linears[:3], linears[3], linears[4:]
        norms, (q_norm, k_norm) = spec.layer_norms(layer), spec.qk_norms(layer)
        x = hidden if norms.before_attention is None else self._norm(hidden, norms.before_attention)
        q, k, v = self.writer.linears(x, qkv, self.weights, prefix + "self_attn.qkv_proj")
        q = self._rotate(layer, self._norm_heads(q, q_norm, spec.num_heads), spec.num_heads)
        k = self._rotate(layer, self._norm_heads(k, k_norm, spec.num_kv_heads), spec.num_kv_heads)
        attended = self.contract.attend(layer, q, k, v)
        (attended,) = self.writer.linears(attended, [output], self.weights, output.name)
        hidden = self._add(hidden, attended, norms.after_attention)

        x = hidden if norms.before_mlp is None else self._norm(hidden, norms.before_mlp)
        if spec.mixture_of(layer) is not None:
            y = write_mixture(self.writer, self.weights, layer, x)
        else:
            y = write_mlp(self.writer, self.weights, mlp, x, prefix + "mlp.gate_up_proj")
        return self._add(hidden, y, norms.after_mlp)

    def _norm_heads(self, x: ir.Value, norm: str | None, heads: int) -> ir.Value:
        """q or k, normalized where the model does: [T, heads, head_dim] or [T, heads * head_dim]."""
        if norm is None:
            return x
        if self.spec.qk_norm_per_head:
            x = self.b.op("Reshape", x, self.b.constant([-1, heads, self.spec.head_dim]))
        return self._norm(x, norm)

    def _rotate(self, layer: int, x: ir.Value, heads: int) -> ir.Value:
        """q or k of T tokens as the contract lays them out, rotated where the layer does."""
        spec = self.spec
        x = self.contract.in_sequences(x, heads * spec.head_dim)
        index = spec.rope_index(layer)
        if index is None:
            return x
        rotary_dim = spec.ropes[index].rotary_dim
        return self.b.op(
            "RotaryEmbedding",
            x,
            *self.rotations[index],
            num_heads=heads,
            rotary_embedding_dim=0 if rotary_dim == spec.head_dim else rotary_dim,
        )

    def _logits(self, hidden: ir.Value, embedding: Embedding) -> ir.Value:
        """Only the wanted rows reach the final norm and the head."""
        spec, b = self.spec, self.b
        x = self._norm(self.contract.logit_rows(hidden), spec.final_norm_name)
        if not spec.tied_embeddings:
            embedding = store_embedding(self.writer, spec.head_name, self.weights.tensor(spec.head_name))
        logits = write_head(self.writer, x, embedding, spec.vocab_size)
        if spec.logit_scale != 1.0:
            logits = b.op("Mul", logits, b.constant(spec.logit_scale, np.float32))
        if spec.logit_softcap is not None:
            cap = b.constant(spec.logit_softcap, np.float32)
            logits = b.op("Mul", b.op("Tanh", b.op("Div", logits, cap)), cap)
        return logits


def set_accuracy_level(model: ir.Model, accuracy_level: int) -> None:
    """Changes how MatMulNBits computes, in place: 0 keeps activations in float32, 4 rounds them to int8."""
    for node in model.graph:
        if node.op_type == "MatMulNBits":
            node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", accuracy_level)


def set_ropes(model: ir.Model, spec: ModelSpec) -> None:
    """Changes the frequencies to those of a spec whose rotary embeddings are chosen for a context, in place.
    They are nothing else that depends on it."""
    chosen = {FREQUENCIES.format(index): rope for index, rope in enumerate(spec.ropes)}
    for node in model.graph:
        rope = chosen.get(node.outputs[0].name or "")
        if node.op_type == "Constant" and rope is not None:
            node.attributes["value"] = ir.AttrTensor("value", ir.tensor(rope.inv_freq()))


def set_cache_type(model: ir.Model, dtype: ir.DataType) -> None:
    """Changes the dtype of the cache's inputs and outputs, in place: float32 as built, or float16."""
    for value in (*model.graph.inputs, *model.graph.outputs):
        if value.name is not None and value.name.startswith(("key_cache", "value_cache")):
            value.type = ir.TensorType(dtype)
