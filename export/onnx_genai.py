"""The genai contract: past and present, and `com.microsoft.GroupQueryAttention`.

Inputs, as onnxruntime-genai gives them (its names are in `genai_config.json`), with B, S and lengths dynamic:

| input | shape, dtype |
|---|---|
| `input_ids` | [B, S] int64, the new tokens |
| `attention_mask` | [B, total] int64, 1 for every token, past or new; 0 at the end of a shorter sequence |
| `position_ids` | [B, S] int64, 0 at the end of a shorter sequence |
| `past_key_values.i.key`, `.value` | [B, kv_heads, past, head_dim] float32 of every layer i |

Outputs are `logits` [B, 1, vocab] float32 of each sequence's last token, and `present.i.key`,
`present.i.value`: past and new, or the past's own buffers, where those are long enough and bound to both.

RoPE and the norms on q and k are operators before the attention, the same as in the paged graph.
"""

from ..models.spec import ModelSpec
from .genai_config import INPUT_NAMES, OUTPUT_NAMES, check_genai
from .onnx_builder import MICROSOFT, Builder, graph_input
from .onnx_contract import Contract, graph_output, window_of
from .onnx_dependency import ir


class GenaiContract:
    """What the module's text says."""

    name: Contract = "genai"

    def __init__(self, b: Builder, spec: ModelSpec) -> None:
        """Raises `UnsupportedModelError` for what the operator cannot express."""
        check_genai(spec)
        self.b, self.spec = b, spec
        self.functions: list[ir.Function] = []
        int64, int32 = ir.DataType.INT64, ir.DataType.INT32.value
        new: list[int | str] = ["batch_size", "sequence_length"]
        input_ids = graph_input(INPUT_NAMES["input_ids"], int64, new)
        mask = graph_input(INPUT_NAMES["attention_mask"], int64, ["batch_size", "total_sequence_length"])
        self.position_ids = graph_input(INPUT_NAMES["position_ids"], int64, new)
        self.past = [
            graph_input(
                INPUT_NAMES[f"past_{kind}_names"] % layer, ir.DataType.FLOAT, self._cache_shape("past")
            )
            for layer in range(spec.num_layers)
            for kind in ("key", "value")
        ]
        self.inputs = [input_ids, mask, self.position_ids, *self.past]
        self.outputs: list[ir.Value] = []

        self.token_ids = b.op("Reshape", input_ids, b.constant([-1]))
        self.sizes = b.op("Shape", input_ids)
        lengths = b.op("ReduceSum", mask, b.constant([1]), keepdims=0)
        # GroupQueryAttention counts tokens from 0.
        self.last_tokens = b.op("Cast", b.op("Sub", lengths, b.constant(1)), to=int32)
        self.total = b.op("Cast", b.op("Gather", b.op("Shape", mask), b.constant(1)), to=int32)
        self._shapes: dict[int, ir.Value] = {}

    def _cache_shape(self, length: str) -> list[int | str]:
        return ["batch_size", self.spec.num_kv_heads, f"{length}_sequence_length", self.spec.head_dim]

    def positions(self) -> ir.Value:
        positions = self.b.op("Cast", self.position_ids, to=ir.DataType.FLOAT.value)
        return self.b.op("Unsqueeze", positions, self.b.constant([2]))

    def in_sequences(self, x: ir.Value, width: int) -> ir.Value:
        if width not in self._shapes:
            self._shapes[width] = self.b.op("Concat", self.sizes, self.b.constant([width]), axis=0)
        return self.b.op("Reshape", x, self._shapes[width])

    def attend(self, layer: int, query: ir.Value, key: ir.Value, value: ir.Value) -> ir.Value:
        spec, b = self.spec, self.b
        attended, *present = b.ops(
            "GroupQueryAttention",
            query,
            key,
            self.in_sequences(value, spec.kv_size),
            *self.past[2 * layer : 2 * layer + 2],
            self.last_tokens,
            self.total,
            domain=MICROSOFT,
            outputs=3,
            num_heads=spec.num_heads,
            kv_num_heads=spec.num_kv_heads,
            scale=spec.softmax_scale,
            softcap=spec.attention_softcap or 0.0,
            local_window_size=window_of(spec, layer) or -1,
        )
        for kind, cache in zip(("key", "value"), present, strict=True):
            graph_output(cache, OUTPUT_NAMES[f"present_{kind}_names"] % layer, self._cache_shape("total"))
        self.outputs += present
        return b.op("Reshape", attended, b.constant([-1, spec.q_size]))

    def logit_rows(self, hidden: ir.Value) -> ir.Value:
        """Positions grow up to a sequence's last token; what is behind it has position 0."""
        b = self.b
        last = b.op("ArgMax", self.position_ids, axis=1, keepdims=0)
        batch, length = (b.op("Gather", self.sizes, b.constant(i)) for i in (0, 1))
        firsts = b.op("Mul", b.op("Range", b.constant(0), batch, b.constant(1)), length)
        return b.op("Gather", hidden, b.op("Add", firsts, last), axis=0)

    def logits(self, logits: ir.Value) -> ir.Value:
        # The 1 tells onnxruntime-genai that a prompt's other tokens have none.
        rows = self.b.op("Unsqueeze", logits, self.b.constant([1]))
        return graph_output(rows, OUTPUT_NAMES["logits"], ["batch_size", 1, self.spec.vocab_size])
