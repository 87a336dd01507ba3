"""`CpuExecutor` near transformers, and near ONNX Runtime, on the dequantized weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoders import (
    CASES,
    UNUSUAL,
    Weights,
    load,
    mean_kl,
    paged_logits,
    quantized,
    read_config,
    some_ids,
    transformers_logits,
)
from numpy.typing import NDArray

from nybble.runtime.batch import prompt_batch
from nybble.runtime.cpu_executor import CpuExecutor
from nybble.runtime.executor import KvDtype


@pytest.mark.parametrize("case", CASES)
def test_near_transformers_on_the_dequantized_weights(
    case: str, make_tiny_model: Callable[..., Path]
) -> None:
    family, overrides = CASES[case]
    path = make_tiny_model(family, **overrides)
    weights = quantized(load(path), 4, 32, True, False)
    ids = some_ids(weights.spec.vocab_size)
    executor = CpuExecutor(weights, threads=1)
    found = paged_logits(executor, ids, kv_dtype="f32")
    executor.close()
    # Activations in 8 bits are all that differs; these random models amplify them more than trained ones.
    assert mean_kl(transformers_logits(read_config(path), weights, ids), found) < 5e-3


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("bits", "group_size"), [(4, 64), (4, 128), (4, -1), (8, 32), (8, 128), (8, -1)])
def test_every_packing_is_near_transformers(
    bits: int, group_size: int, symmetric: bool, permuted: bool, make_tiny_model: Callable[..., Path]
) -> None:
    path = make_tiny_model("qwen2", hidden_size=80, tie_word_embeddings=symmetric)
    weights = quantized(load(path), bits, group_size, symmetric, permuted)
    ids = some_ids(weights.spec.vocab_size)
    executor = CpuExecutor(weights, threads=1)
    found = paged_logits(executor, ids, kv_dtype="f32")
    executor.close()
    assert mean_kl(transformers_logits(read_config(path), weights, ids), found) < 5e-3


@pytest.mark.slow
def test_smollm2_stays_near_transformers_over_4096_tokens_of_prose() -> None:
    from nybble.models.open import open_source
    from nybble.quant.calibration import evaluation_text
    from nybble.quant.quality import evaluation_windows, kl_divergence, perplexity
    from nybble.runtime.tokenizer import Tokenizer

    source = open_source("smollm2")
    text = Tokenizer(source.tokenizer_files).encode(evaluation_text(), add_special_tokens=False)
    windows = evaluation_windows(np.asarray(text), 8, 512)
    weights = quantized(load("smollm2"), 4, 32, True, False)
    config = dict(source.config)
    expected = [transformers_logits(config, weights, ids.tolist()) for ids in windows]

    def losses(logits: list[NDArray[np.float32]]) -> NDArray[np.float64]:
        pairs = zip(logits, windows, strict=True)
        return np.array([np.log(perplexity(lambda _, x=x: x[None], ids[None])) for x, ids in pairs])

    executor = CpuExecutor(weights, threads=2)
    bounds: list[tuple[KvDtype, float, float]] = [
        ("int16", 5e-3, 1.008),
        ("f16", 5e-3, 1.008),
        ("int8", 8e-3, 1.012),
    ]
    for kind, most_kl, most_perplexity in bounds:
        executor.allocate_kv(512 // 16, kv_dtype=kind)
        found = [executor.step(prompt_batch(ids.tolist(), 1, 16)).copy() for ids in windows]
        kl = np.mean([kl_divergence(e, f) for e, f in zip(expected, found, strict=True)])
        assert kl < most_kl
        assert np.exp((losses(found) - losses(expected)).mean()) < most_perplexity
    executor.close()


def test_partial_rotation_soft_caps_and_scales_near_onnx_runtime() -> None:
    from nybble.runtime.ort_executor import OrtExecutor

    spec = UNUSUAL
    rng = np.random.default_rng(5)
    tensors: Any = {
        name: (rng.normal(size=shape) * (0.2 if len(shape) == 2 else 1)).astype(np.float32)
        for name, shape in spec.tensors().items()
    }
    weights = quantized(Weights(spec, tensors), 8, 32, True, False)
    ids = some_ids(spec.vocab_size)
    with OrtExecutor.from_weights(weights, threads=1, accuracy_level=0) as reference:
        expected = paged_logits(reference, ids)
    executor = CpuExecutor(weights, threads=1)
    found = paged_logits(executor, ids, kv_dtype="f32")
    executor.close()
    assert np.abs(expected).max() > 1
    assert mean_kl(expected, found) < 5e-3
