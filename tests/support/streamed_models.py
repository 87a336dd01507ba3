"""A small model in a file of packed weights, run with any part of it streamed."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from decoders import Pages, Weights, load, quantized, some_ids
from numpy.typing import NDArray

from nybble.devices.residency import ResidencyPlan
from nybble.runtime.batch import Batch
from nybble.runtime.cpu_executor import CpuExecutor
from nybble.runtime.packed_cache import build_packed, open_packed
from nybble.runtime.packed_file import MappedWeights
from nybble.runtime.packed_weights import FreshlyPacked

DIGEST = "cd" * 32
LAYERS, SEQUENCES, LENGTH = 4, 3, 160
# Family, what differs in its config, and bits, group size, whether symmetric, whether permuted.
Description = tuple[str, dict[str, Any], tuple[int, int, bool, bool]]


class StreamedModel:
    """A file of packed weights, and what they give when all are resident."""

    def __init__(self, weights: Weights, folder: Path) -> None:
        self.spec, self.file = weights.spec, folder / "packed.bin"
        build_packed(self.file, FreshlyPacked(weights), DIGEST)
        self.pages = Pages(self.spec, SEQUENCES, LENGTH)
        self.resident = self.executor(None)
        self.ids = some_ids(self.spec.vocab_size, LENGTH)

    @classmethod
    def made(
        cls, description: Description, make_tiny_model: Callable[..., Path], folder: Path
    ) -> "StreamedModel":
        family, overrides, packing = description
        path = make_tiny_model(family, **{"num_hidden_layers": LAYERS, **overrides})
        return cls(quantized(load(path), *packing), folder)

    @property
    def experts(self) -> int:
        """Of all layers, shared ones left out."""
        assert self.spec.mixture is not None
        return len(self.spec.mixture.layers) * self.spec.mixture.num_experts

    def open(self, residency: ResidencyPlan | None, file: Path | None = None) -> MappedWeights:
        return open_packed(file or self.file, self.spec, DIGEST, residency)

    def executor(
        self,
        residency: ResidencyPlan | None,
        threads: int = 2,
        read_timeout: float = 30.0,
        file: Path | None = None,
    ) -> CpuExecutor:
        executor = CpuExecutor.from_packed(
            self.open(residency, file), threads=threads, residency=residency, read_timeout=read_timeout
        )
        executor.allocate_kv(self.pages.num_blocks, self.pages.page_size, "f16")
        return executor

    def batch(self, chunks: list[tuple[int, int]], past: list[int], rows: bool = True) -> Batch:
        """A step of so many new tokens of these sequences."""
        batch = self.pages.batch([(s, past[s], self.ids[past[s] : past[s] + n]) for s, n in chunks])
        return batch if rows else replace(batch, logit_rows=np.empty(0, np.int32))

    def steps(
        self, executor: CpuExecutor, counts: tuple[int, ...] = (40, 1, 1, 1, 1, 1)
    ) -> NDArray[np.float32]:
        """Logits of steps of so many tokens of one sequence."""
        past, found = 0, []
        for count in counts:
            found.append(executor.step(self.batch([(0, count)], [past])).copy())
            past += count
        return np.concatenate(found)
