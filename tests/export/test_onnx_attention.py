"""`ai.nybble::PagedAttention` in ONNX Runtime against attention written out in numpy, in float64."""

import functools
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nybble.export.onnx_attention import INPUTS, NAME, paged_attention_function
from nybble.export.onnx_builder import IR_VERSION, NYBBLE, OPSET_IMPORTS, Builder, graph_input

HEAD_DIM = 8


@functools.cache
def session(heads: int, kv_heads: int, window: int, softcap: float, half_cache: bool) -> Any:
    cache = ir.DataType.FLOAT16 if half_cache else ir.DataType.FLOAT
    float32, int32 = ir.DataType.FLOAT, ir.DataType.INT32
    page = ["num_blocks", "page_size", kv_heads, HEAD_DIM]
    kinds: dict[str, tuple[ir.DataType, list[int | str]]] = {
        "query": (float32, ["T", heads * HEAD_DIM]),
        "key": (float32, ["T", kv_heads * HEAD_DIM]),
        "value": (float32, ["T", kv_heads * HEAD_DIM]),
        "key_cache": (cache, page),
        "value_cache": (cache, page),
        "cu_seqlens": (int32, ["B + 1"]),
        "past_lens": (int32, ["B"]),
        "block_table": (int32, ["B", "max_blocks"]),
        "slot_mapping": (int32, ["T"]),
        "page_size": (ir.DataType.INT64, [1]),
    }
    inputs = [graph_input(name, *kinds[name]) for name in INPUTS]
    b = Builder()
    outputs = b.ops(
        NAME,
        *inputs,
        domain=NYBBLE,
        outputs=3,
        num_heads=heads,
        kv_num_heads=kv_heads,
        head_dim=HEAD_DIM,
        scale=0.37,
        softcap=softcap,
        window=window,
    )
    for value, name, dtype in zip(outputs, ("y", "k", "v"), (float32, cache, cache), strict=True):
        value.name, value.type = name, ir.TensorType(dtype)
    graph = ir.Graph(inputs, outputs, nodes=b.nodes, opset_imports=OPSET_IMPORTS | {NYBBLE: 1}, name="test")
    model = ir.Model(graph, ir_version=IR_VERSION, functions=[paged_attention_function()])
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return ort.InferenceSession(
        ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def reference(
    x: dict[str, Any], heads: int, kv_heads: int, window: int, softcap: float
) -> tuple[Any, Any, Any]:
    """Output, keys and values after the step, a token and a head at a time."""
    keys, values = x["key_cache"].copy(), x["value_cache"].copy()
    page_size = keys.shape[1]
    for t, slot in enumerate(x["slot_mapping"]):
        if slot >= 0:
            place = divmod(int(slot), page_size)
            keys[place] = x["key"][t].reshape(kv_heads, HEAD_DIM)
            values[place] = x["value"][t].reshape(kv_heads, HEAD_DIM)
    output = np.zeros((len(x["query"]), heads, HEAD_DIM))
    for b, past in enumerate(x["past_lens"].tolist()):
        for offset, t in enumerate(range(x["cu_seqlens"][b], x["cu_seqlens"][b + 1])):
            position = past + offset
            seen = [
                divmod(p, page_size)
                for p in range(position + 1)
                if x["block_table"][b, p // page_size] >= 0 and (not window or p > position - window)
            ]
            for head in range(heads if seen else 0):
                kv = head * kv_heads // heads
                places = [(x["block_table"][b, page], inside, kv) for page, inside in seen]
                k = np.array([keys[place] for place in places], np.float64)
                v = np.array([values[place] for place in places], np.float64)
                query = x["query"][t].reshape(heads, HEAD_DIM)[head].astype(np.float64)
                scores = k @ query * 0.37
                if softcap:
                    scores = softcap * np.tanh(scores / softcap)
                weights = np.exp(scores - scores.max())
                output[t, head] = weights @ v / weights.sum()
    return output.reshape(len(output), -1), keys, values


@st.composite
def steps(draw: st.DrawFn, kv_heads: int, heads: int) -> dict[str, Any]:
    """Up to four sequences of up to seven new tokens, none included, in shuffled pages; some columns
    unmapped, some writes skipped, and a table wider than needed."""
    page_size = draw(st.sampled_from([1, 4, 16]))
    sequences = draw(
        st.lists(st.tuples(st.integers(0, 20), st.integers(0, 7)), min_size=1, max_size=4).filter(
            lambda found: any(new for _, new in found)
        )
    )
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    width = max(-(-(past + new) // page_size) for past, new in sequences) + draw(st.integers(0, 2))
    count = len(sequences) * width
    table = rng.permutation(count + 3)[:count].reshape(len(sequences), width).astype(np.int32)
    slots = [
        table[b, p // page_size] * page_size + p % page_size
        for b, (past, new) in enumerate(sequences)
        for p in range(past, past + new)
    ]
    tokens = len(slots)
    slot_mapping = np.where(rng.random(tokens) < 0.2, -1, slots).astype(np.int32)
    table = np.where(rng.random(table.shape) < 0.15, -1, table).astype(np.int32)

    def normal(*shape: int) -> Any:
        return rng.normal(size=shape).astype(np.float32)

    page = (count + 3, page_size, kv_heads, HEAD_DIM)
    return {
        "query": normal(tokens, heads * HEAD_DIM) * 2,
        "key": normal(tokens, kv_heads * HEAD_DIM) * 2,
        "value": normal(tokens, kv_heads * HEAD_DIM),
        "key_cache": normal(*page),
        "value_cache": normal(*page),
        "cu_seqlens": np.cumsum([0, *(new for _, new in sequences)]).astype(np.int32),
        "past_lens": np.array([past for past, _ in sequences], np.int32),
        "block_table": table,
        "slot_mapping": slot_mapping,
        "page_size": np.array([page_size], np.int64),
    }


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 2), (6, 1)])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (5, 0.0), (0, 3.0), (5, 3.0)])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_mixed_steps_equal_numpy(
    heads: int, kv_heads: int, window: int, softcap: float, data: st.DataObject
) -> None:
    x = data.draw(steps(kv_heads, heads))
    y, k, v = session(heads, kv_heads, window, softcap, False).run(["y", "k", "v"], x)
    expected, keys, values = reference(x, heads, kv_heads, window, softcap)
    np.testing.assert_allclose(y, expected, rtol=0, atol=5e-6)
    np.testing.assert_array_equal(k, keys)
    np.testing.assert_array_equal(v, values)


@settings(max_examples=25, deadline=None)
@given(x=steps(2, 4))
def test_a_cache_in_float16_rounds_what_it_holds_and_nothing_else(x: dict[str, Any]) -> None:
    x |= {name: x[name].astype(np.float16) for name in ("key_cache", "value_cache")}
    y, k, _ = session(4, 2, 0, 0.0, True).run(["y", "k", "v"], x)
    expected, keys, _ = reference(x, 4, 2, 0, 0.0)
    assert k.dtype == np.float16
    np.testing.assert_array_equal(k, keys)
    np.testing.assert_allclose(y, expected, rtol=0, atol=5e-6)
