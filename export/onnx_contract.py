"""The attention contracts: what a decoder's graph is given and gives back besides its weights.

| | paged | genai |
|---|---|---|
| who runs it | `OrtExecutor` | onnxruntime-genai, and others that step with past and present |
| tokens | packed, [T] | one row a sequence, [B, S] |
| keys and values | pages, a block table | past and present, each sequence's own |
| attention | `ai.nybble::PagedAttention` | `com.microsoft.GroupQueryAttention` |
| logits | of the rows asked for | of each sequence's last token |

`onnx_graph.py` builds the same decoder over either. This module has the paged one, `onnx_genai.py` the other.
"""

from typing import Literal, Protocol, get_args

from ..models.spec import ModelSpec
from .onnx_attention import NAME as PAGED_ATTENTION
from .onnx_attention import PackedLayout, paged_attention_function
from .onnx_builder import NYBBLE, Builder, graph_input
from .onnx_dependency import ir

Contract = Literal["paged", "genai"]
CONTRACTS: tuple[Contract, ...] = get_args(Contract)


class AttentionContract(Protocol):
    """The part of a graph that depends on the contract; `token_ids` is [T], all its tokens."""

    name: Contract
    inputs: list[ir.Value]
    outputs: list[ir.Value]  # keys and values, once every layer has attended
    functions: list[ir.Function]
    token_ids: ir.Value

    def positions(self) -> ir.Value:
        """Each token's position, [1, T, 1] or [B, S, 1] float32."""
        ...

    def in_sequences(self, x: ir.Value, width: int) -> ir.Value:
        """`x`, `width` numbers for each of T tokens, laid out as the positions: [1, T, width] or
        [B, S, width]."""
        ...

    def attend(self, layer: int, query: ir.Value, key: ir.Value, value: ir.Value) -> ir.Value:
        """[T, num_heads * head_dim]. `query` and `key` are rotated, as `in_sequences` lays them out; `value`
        is [T, kv_size]."""
        ...

    def logit_rows(self, hidden: ir.Value) -> ir.Value:
        """Those rows of [T, hidden] whose logits the graph gives, [R, hidden]."""
        ...

    def logits(self, logits: ir.Value) -> ir.Value:
        """The graph's output of logits [R, vocab]."""
        ...


class PagedContract:
    """The arrays of `runtime/batch.py`, and for every layer i `key_cache.i` and `value_cache.i` [num_blocks,
    page_size, kv_heads, head_dim]; outputs are `logits` [R, vocab] float32 and `key_cache_out.i`,
    `value_cache_out.i`, to be bound to the same memory as the inputs. T, B, R, num_blocks, page_size and
    max_blocks are dynamic; T and B at least 1."""

    name: Contract = "paged"

    def __init__(self, b: Builder, spec: ModelSpec) -> None:
        self.b, self.spec = b, spec
        self.functions = [paged_attention_function()]
        int32 = ir.DataType.INT32
        groups = len(window_groups(spec))
        self.token_ids = graph_input("token_ids", int32, ["T"])
        self.cu_seqlens = graph_input("cu_seqlens", int32, ["B + 1"])
        self.past_lens = graph_input("past_lens", int32, ["B"])
        block_table = graph_input("block_table", int32, [groups, "B", "max_blocks"])
        slot_mapping = graph_input("slot_mapping", int32, [groups, "T"])
        self.rows = graph_input("logit_rows", int32, ["R"])
        self.block_tables = [b.op("Gather", block_table, b.constant(g), axis=0) for g in range(groups)]
        self.slot_mappings = [b.op("Gather", slot_mapping, b.constant(g), axis=0) for g in range(groups)]

        self._cache_shape: list[int | str] = ["num_blocks", "page_size", spec.num_kv_heads, spec.head_dim]
        self.caches = [
            graph_input(f"{kind}_cache.{layer}", ir.DataType.FLOAT, self._cache_shape)
            for layer in range(spec.num_layers)
            for kind in ("key", "value")
        ]
        self.page_size = b.op("Shape", self.caches[0], start=1, end=2)
        arrays = [self.token_ids, self.cu_seqlens, self.past_lens, block_table, slot_mapping, self.rows]
        self.inputs = arrays + self.caches
        self.outputs: list[ir.Value] = []

    def positions(self) -> ir.Value:
        layout = PackedLayout(self.b, self.token_ids, self.cu_seqlens, self.past_lens)
        positions = self.b.op("Cast", layout.positions(), to=ir.DataType.FLOAT.value)
        return self.b.op("Unsqueeze", positions, self.b.constant([0, 2]))

    def in_sequences(self, x: ir.Value, width: int) -> ir.Value:
        return self.b.op("Reshape", x, self.b.constant([1, -1, width]))

    def attend(self, layer: int, query: ir.Value, key: ir.Value, value: ir.Value) -> ir.Value:
        spec, b = self.spec, self.b
        window = window_of(spec, layer)
        group = window_groups(spec).index(window)
        attended, *written = b.ops(
            PAGED_ATTENTION,
            b.op("Squeeze", query, b.constant([0])),
            b.op("Squeeze", key, b.constant([0])),
            value,
            *self.caches[2 * layer : 2 * layer + 2],
            self.cu_seqlens,
            self.past_lens,
            self.block_tables[group],
            self.slot_mappings[group],
            self.page_size,
            domain=NYBBLE,
            outputs=3,
            num_heads=spec.num_heads,
            kv_num_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            scale=spec.softmax_scale,
            softcap=spec.attention_softcap or 0.0,
            window=window or 0,
        )
        for kind, cache in zip(("key", "value"), written, strict=True):
            graph_output(cache, f"{kind}_cache_out.{layer}", self._cache_shape)
        self.outputs += written
        return attended

    def logit_rows(self, hidden: ir.Value) -> ir.Value:
        return self.b.op("Gather", hidden, self.rows, axis=0)

    def logits(self, logits: ir.Value) -> ir.Value:
        return graph_output(logits, "logits", ["R", self.spec.vocab_size])


def graph_output(value: ir.Value, name: str, shape: list[int | str]) -> ir.Value:
    """`value` as a float32 output of the graph."""
    value.name = name
    value.type, value.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(shape)
    return value


def window_groups(spec: ModelSpec) -> tuple[int | None, ...]:
    """The distinct windows, of which there is at least one."""
    return spec.window_groups or (None,)


def window_of(spec: ModelSpec, layer: int) -> int | None:
    """How many tokens a token of the layer sees, itself included; None is all."""
    return spec.sliding_windows[layer] if spec.sliding_windows else None
