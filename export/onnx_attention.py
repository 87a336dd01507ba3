"""`ai.nybble::PagedAttention` as a model-local function: attention over a paged cache in standard operators.

ONNX Runtime's own `com.microsoft.PagedAttention` exists for CUDA only, in 16 bits; this body runs wherever
ONNX Runtime does, on the same inputs and the same cache layout.

    PagedAttention(query, key, value, key_cache, value_cache, cu_seqlens, past_lens, block_table,
                   slot_mapping, page_size) -> (output, key_cache_out, value_cache_out)

| input | shape, dtype |
|---|---|
| `query` | [T, num_heads * head_dim] float32, rotated already |
| `key`, `value` | [T, kv_num_heads * head_dim] float32, the key rotated already |
| `key_cache`, `value_cache` | [num_blocks, page_size, kv_num_heads, head_dim] float32 or float16 |
| `cu_seqlens` | [B + 1] int32, where each sequence's new tokens begin |
| `past_lens` | [B] int32, tokens of each sequence already in the cache |
| `block_table` | [B, max_blocks] int32, pages of each sequence, -1 unmapped |
| `slot_mapping` | [T] int32, page * page_size + offset for each new token, -1 to skip the write |
| `page_size` | [1] int64, the caches' second dimension |

`output` is [T, num_heads * head_dim] in the query's dtype; the caches are the inputs with the new rows.

Attributes: `num_heads`, `kv_num_heads` and `head_dim` (int), `scale` (float, multiplies the scores),
`softcap` (float, 0 is none: scores become cap * tanh(scores / cap)), `window` (int, how many tokens a token
sees, itself included; 0 is all).

A token sees the positions up to its own that its window covers and its block table maps; one that sees none
gets zeros. Keys and values are always read back from the cache, so a 16-bit cache rounds those of the same
chunk too. T and B are at least 1. Cost grows with the width of `block_table` and with B times the longest
chunk: trim the one and keep chunks of unlike lengths apart.

ONNX Runtime inlines the body and merges equal subexpressions, so what depends only on the batch (mask,
indices) is computed once a step. That is why `page_size` is an input and sizes are attributes: read from a
layer's own tensors they would keep the layers' index arithmetic apart, twice as many operators.
"""

import numpy as np

from .onnx_builder import NYBBLE, OPSET, Builder
from .onnx_dependency import ir

NAME = "PagedAttention"
INPUTS = (
    "query",
    "key",
    "value",
    "key_cache",
    "value_cache",
    "cu_seqlens",
    "past_lens",
    "block_table",
    "slot_mapping",
    "page_size",
)


def paged_attention_function() -> ir.Function:
    """The function described above, opset 23."""
    inputs = [ir.Value(name=name) for name in INPUTS]
    query, key, value, key_cache, value_cache, cu_seqlens, past_lens, block_table, slots, page_size = inputs
    b = Builder()
    heads, kv_heads, head_dim = (_size(b, name) for name in ("num_heads", "kv_num_heads", "head_dim"))

    rows, targets = _kept_slots(b, slots, page_size)
    row_shape = b.op("Concat", b.constant([-1]), kv_heads, head_dim, axis=0)
    keys_out = _write(b, key_cache, key, rows, targets, row_shape)
    values_out = _write(b, value_cache, value, rows, targets, row_shape)

    layout = PackedLayout(b, slots, cu_seqlens, past_lens)
    pad, unpad = layout.pad_and_unpad()
    pages = b.op("Max", block_table, b.constant(0, np.int32))
    cached_shape = b.op("Concat", b.constant([0, -1]), b.op("Mul", kv_heads, head_dim), axis=0)
    attended = b.op(
        "Attention",
        b.op("Gather", query, pad, axis=0),
        _read(b, keys_out, pages, cached_shape, query),
        _read(b, values_out, pages, cached_shape, query),
        _mask(b, layout.padded_positions(), block_table, page_size),
        q_num_heads=_reference("q_num_heads", "num_heads", ir.AttributeType.INT),
        kv_num_heads=_reference("kv_num_heads", "kv_num_heads", ir.AttributeType.INT),
        scale=_reference("scale", "scale", ir.AttributeType.FLOAT),
        softcap=_reference("softcap", "softcap", ir.AttributeType.FLOAT),
    )
    flat_shape = b.op("Concat", b.constant([-1]), b.op("Mul", heads, head_dim), axis=0)
    output = b.op("Gather", b.op("Reshape", attended, flat_shape), unpad, axis=0)

    for tensor, name in ((output, "output"), (keys_out, "key_cache_out"), (values_out, "value_cache_out")):
        tensor.name = name
    return ir.Function(
        NYBBLE,
        NAME,
        graph=ir.Graph(inputs, [output, keys_out, values_out], nodes=b.nodes, opset_imports={"": OPSET}),
        attributes=[
            ir.AttrInt64("num_heads", 1),
            ir.AttrInt64("kv_num_heads", 1),
            ir.AttrInt64("head_dim", 1),
            ir.AttrFloat32("scale", 1.0),
            ir.AttrFloat32("softcap", 0.0),
            ir.AttrInt64("window", 0),
        ],
    )


class PackedLayout:
    """Index arithmetic on packed tokens, int64. `tokens` is anything whose first dimension is T."""

    def __init__(self, b: Builder, tokens: ir.Value, cu_seqlens: ir.Value, past_lens: ir.Value) -> None:
        self.b = b
        int64 = ir.DataType.INT64.value
        self.bounds = b.op("Cast", cu_seqlens, to=int64)
        self.past = b.op("Cast", past_lens, to=int64)
        one, zero = b.constant([1]), b.constant([0])
        self.starts = b.op("Slice", self.bounds, zero, b.constant([-1]))
        self.ends = b.op("Slice", self.bounds, one, b.constant([np.iinfo(np.int64).max]))
        self.count = b.op("Squeeze", b.op("Shape", tokens, start=0, end=1), zero)
        self.index = b.op("Range", b.constant(0), self.count, b.constant(1))
        # Sequences that end at or before a token, counted: the token's own sequence, empty ones included.
        ended = b.op("LessOrEqual", self.ends, b.op("Unsqueeze", self.index, one))
        self.sequence = b.op("ReduceSum", b.op("Cast", ended, to=int64), one, keepdims=0)
        self.offset = b.op("Sub", self.index, b.op("Gather", self.starts, self.sequence))
        # At least 2: ONNX Runtime multiplies a single row by another kernel, which rounds differently, and
        # a decode's logits would not be those that the same token has in a chunk.
        longest = b.op("ReduceMax", b.op("Sub", self.ends, self.starts), keepdims=0)
        self.longest = b.op("Max", longest, b.constant(2))

    def positions(self) -> ir.Value:
        """[T]: each token's position in its sequence."""
        return self.b.op("Add", self.b.op("Gather", self.past, self.sequence), self.offset)

    def _column(self, values: ir.Value) -> ir.Value:
        return self.b.op("Unsqueeze", values, self.b.constant([1]))

    def _steps(self) -> ir.Value:
        return self.b.op("Range", self.b.constant(0), self.longest, self.b.constant(1))

    def padded_positions(self) -> ir.Value:
        """[B, L]: positions of each sequence's new tokens, running on past its end; L is the longest."""
        return self.b.op("Add", self._column(self.past), self._steps())

    def pad_and_unpad(self) -> tuple[ir.Value, ir.Value]:
        """[B, L] rows of T that lay the tokens out one sequence a row, and [T] rows of B * L that undo it."""
        b = self.b
        last = b.op("Sub", self.count, b.constant(1))
        pad = b.op("Min", b.op("Add", self._column(self.starts), self._steps()), last)
        unpad = b.op("Add", b.op("Mul", self.sequence, self.longest), self.offset)
        return pad, unpad


def _reference(name: str, attribute: str, kind: ir.AttributeType) -> ir.Attr:
    return ir.RefAttr(name, attribute, kind)


def _size(b: Builder, attribute: str) -> ir.Value:
    """An int attribute of the function, [1] int64."""
    value = b.op("Constant", value_int=_reference("value_int", attribute, ir.AttributeType.INT))
    return b.op("Unsqueeze", value, b.constant([0]))


def _kept_slots(b: Builder, slot_mapping: ir.Value, page_size: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Rows of T to write, and their [page, offset] pairs. A negative index would write from the end."""
    slots = b.op("Cast", slot_mapping, to=ir.DataType.INT64.value)
    keep = b.op("GreaterOrEqual", slots, b.constant(0))
    rows = b.op("Squeeze", b.op("NonZero", keep), b.constant([0]))
    kept = b.op("Unsqueeze", b.op("Gather", slots, rows), b.constant([1]))
    return rows, b.op("Concat", b.op("Div", kept, page_size), b.op("Mod", kept, page_size), axis=1)


def _write(
    b: Builder, cache: ir.Value, new: ir.Value, rows: ir.Value, slots: ir.Value, row_shape: ir.Value
) -> ir.Value:
    kept = b.op("Reshape", b.op("Gather", new, rows, axis=0), row_shape)
    return b.op("ScatterND", cache, slots, b.op("CastLike", kept, cache))


def _read(b: Builder, cache: ir.Value, pages: ir.Value, shape: ir.Value, like: ir.Value) -> ir.Value:
    """[B, max_blocks * page_size, kv_num_heads * head_dim] of the sequences' pages, in `like`'s dtype."""
    return b.op("CastLike", b.op("Reshape", b.op("Gather", cache, pages, axis=0), shape), like)


def _mask(b: Builder, positions: ir.Value, block_table: ir.Value, page_size: ir.Value) -> ir.Value:
    """[B, 1, L, max_blocks * page_size] bool, true where a new token sees a cached one."""
    pages = b.op("Shape", block_table, start=1, end=2)
    cached = b.op("Mul", pages, page_size)
    key_positions = b.op("Range", b.constant(0), b.op("Squeeze", cached), b.constant(1))
    query_positions = b.op("Unsqueeze", positions, b.constant([1, 3]))  # [B, 1, L, 1]
    causal = b.op("LessOrEqual", key_positions, query_positions)

    window = b.op("Constant", value_int=_reference("value_int", "window", ir.AttributeType.INT))
    unlimited = b.constant(np.iinfo(np.int32).max)
    reach = b.op("Where", b.op("Greater", window, b.constant(0)), window, unlimited)
    near = b.op("Greater", key_positions, b.op("Sub", query_positions, reach))

    mapped = b.op("GreaterOrEqual", block_table, b.constant(0, np.int32))
    mapped = b.op("Unsqueeze", mapped, b.constant([2]))  # [B, max_blocks, 1]
    mapped = b.op("Expand", mapped, b.op("Concat", b.constant([1, 1]), page_size, axis=0))
    batch = b.op("Shape", block_table, start=0, end=1)
    mapped = b.op("Reshape", mapped, b.op("Concat", batch, b.constant([1, 1, -1]), axis=0))
    return b.op("And", b.op("And", causal, near), mapped)
