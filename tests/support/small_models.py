"""Models small enough to run thousands of steps of in a test."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from decoders import UNUSUAL, Weights, quantized

from nybble.runtime.cpu_executor import CpuExecutor


@cache
def small_weights(windows: tuple[int | None, ...] = (None, None), vocab_size: int = 64) -> Weights:
    """A random decoder, a layer for each window."""
    spec = replace(UNUSUAL, vocab_size=vocab_size, num_layers=len(windows), sliding_windows=windows)
    rng = np.random.default_rng(5)
    tensors: Any = {
        name: (rng.normal(size=shape) * (0.2 if len(shape) == 2 else 1)).astype(np.float32)
        for name, shape in spec.tensors().items()
    }
    return quantized(Weights(spec, tensors), 8, 32, True, False)


def small_executor(
    windows: tuple[int | None, ...] = (None, None), num_blocks: int = 64, threads: int = 1
) -> CpuExecutor:
    """That decoder on our own kernels, with a cache."""
    executor = CpuExecutor(small_weights(windows), threads=threads)
    executor.allocate_kv(num_blocks, kv_dtype="f16")
    return executor
