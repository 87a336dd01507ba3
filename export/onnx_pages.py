"""Three small graphs that move pages of the cache, so that a cache on any device is handled alike.

All take the decoder's cache inputs of one window group, whose pages are its own, and give its cache outputs,
bound to the same memory. `data` is [n, 2 * layers of the group, page_size, kv_heads, head_dim], a page's keys
and values layer after layer.
"""

from typing import Literal

import numpy as np

from ..models.spec import ModelSpec
from .onnx_builder import IR_VERSION, OPSET, Builder, graph_input
from .onnx_dependency import ir

PageOperation = Literal["copy", "read", "write"]
PAGE_OPERATIONS: tuple[PageOperation, ...] = ("copy", "read", "write")


def cache_names(spec: ModelSpec, group: int | None = None) -> list[str]:
    """The decoder's cache inputs in order, or those of a window group's layers; the outputs have
    `_cache_out.` for `_cache.`."""
    layers = (i for i, its_group in enumerate(spec.group_of_layer) if group in (None, its_group))
    return [f"{kind}_cache.{layer}" for layer in layers for kind in ("key", "value")]


def output_name(cache: str) -> str:
    """The cache output that is bound to the same memory as the input `cache`."""
    return cache.replace("_cache.", "_cache_out.")


def build_page_operation(
    spec: ModelSpec, operation: PageOperation, group: int, dtype: ir.DataType
) -> ir.Model:
    """`copy` (inputs `src`, `dst` [n] int32), `read` (`ids`; output `data`) or `write` (`ids`, `data`)."""
    b = Builder()
    page: list[int | str] = ["page_size", spec.num_kv_heads, spec.head_dim]
    names = cache_names(spec, group)
    caches = [graph_input(name, dtype, ["num_blocks", *page]) for name in names]
    data = graph_input("data", dtype, ["n", len(names), *page])
    ids = [
        graph_input(n, ir.DataType.INT32, ["n"])
        for n in (("src", "dst") if operation == "copy" else ("ids",))
    ]
    inputs, outputs = [*caches, *ids], []
    if operation == "read":
        pages = [b.op("Unsqueeze", b.op("Gather", c, ids[0], axis=0), b.constant([1])) for c in caches]
        joined = b.op("Concat", *pages, axis=1)
        joined.name, joined.type, joined.shape = data.name, data.type, data.shape
        outputs.append(joined)
    else:
        target = b.op("Unsqueeze", b.op("Cast", ids[-1], to=ir.DataType.INT64.value), b.constant([1]))
        if operation == "copy":
            new = [b.op("Gather", cache, ids[0], axis=0) for cache in caches]
        else:
            inputs.append(data)
            new = [b.op("Gather", data, b.constant(i, np.int64), axis=1) for i in range(len(names))]
        for cache, pages_in, name in zip(caches, new, names, strict=True):
            out = b.op("ScatterND", cache, target, pages_in)
            out.name, out.type, out.shape = output_name(name), cache.type, cache.shape
            outputs.append(out)
    graph = ir.Graph(inputs, outputs, nodes=b.nodes, opset_imports={"": OPSET}, name=f"{operation}_pages")
    return ir.Model(graph, ir_version=IR_VERSION, producer_name="nybble")
