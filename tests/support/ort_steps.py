"""A small model for `OrtExecutor`, and steps of it in which each sequence has pages of its own."""

from typing import Any

import numpy as np
from decoders import Weights
from numpy.typing import NDArray

from nybble.export.weights import LogicalTensor
from nybble.models.spec import ModelSpec, RopeSpec
from nybble.quant.packing import QuantizedTensor, quantize_head
from nybble.runtime.batch import Batch
from nybble.runtime.executor import Executor

PAGE, BLOCKS, VOCAB = 4, 24, 90
IDS = np.random.default_rng(4).integers(0, VOCAB, 24).tolist()


def make_weights() -> Weights:
    """Two layers, the second with a window, 4 bits in groups of 32, a tied 8-bit head."""
    spec = ModelSpec(
        model_type="llama",
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position=128,
        norm_eps=1e-5,
        rope=RopeSpec(theta=1e4, rotary_dim=16),
        tied_embeddings=True,
        sliding_windows=(None, 6),
    )
    rng = np.random.default_rng(0)
    tensors: dict[str, LogicalTensor] = {}
    for name, shape in spec.tensors().items():
        if name == spec.embedding_name:
            tensors[name] = quantize_head(rng.normal(size=shape).astype(np.float32))
        elif len(shape) == 1:
            tensors[name] = rng.uniform(0.5, 1.5, shape).astype(np.float32)
        else:
            out, columns = shape
            tensors[name] = QuantizedTensor(
                packed=rng.integers(0, 256, (out, columns // 2), np.uint8),
                scales=rng.uniform(0.01, 0.04, (out, columns // 32)).astype(np.float16),
                zeros=None,
                bits=4,
                group_size=32,
                in_features=columns,
            )
    return Weights(spec, tensors)


def int32(*values: Any) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def make_batch(chunks: list[tuple[int, list[int]]], rows: list[int] | None = None) -> Batch:
    """Sequences of (tokens before, new ids); sequence b has pages 6b to 6b + 5 in the first group, and the
    same backwards in the second."""
    tables = [[range(6 * b, 6 * b + 6) for b in range(len(chunks))]]
    tables.append([range(6 * b + 5, 6 * b - 1, -1) for b in range(len(chunks))])
    slots = [
        [
            table[b][p // PAGE] * PAGE + p % PAGE
            for b, (past, ids) in enumerate(chunks)
            for p in range(past, past + len(ids))
        ]
        for table in tables
    ]
    bounds = np.cumsum([0, *(len(ids) for _, ids in chunks)]).astype(np.int32)
    return Batch(
        token_ids=int32(*(token for _, ids in chunks for token in ids)),
        cu_seqlens=bounds,
        past_lens=int32(*(past for past, _ in chunks)),
        block_table=np.array([[list(pages) for pages in table] for table in tables], np.int32).reshape(
            2, len(chunks), 6
        ),
        slot_mapping=np.array(slots, np.int32).reshape(2, bounds[-1]),
        logit_rows=int32(*(range(bounds[-1]) if rows is None else rows)),
    )


def read_all(executor: Executor, pages: NDArray[np.int32]) -> list[bytes]:
    """What these pages hold in each group."""
    return [executor.read_blocks(pages, group) for group in range(len(executor.kv_layout.group_bytes))]
