"""Packed weights kept in a file: the same bits and the same logits as packed afresh."""

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoders import MIXED, Weights, load, paged_logits, quantized, some_ids
from numpy.typing import NDArray
from packed_files import DIGEST, assert_same, mapped, names

from nybble.devices.residency import HUGE_PAGE
from nybble.export.weights import LogicalTensor
from nybble.quant import packing_rows
from nybble.quant.packing import QuantizedTensor, from_gptq, quantize_head, to_gptq
from nybble.quant.packing_rows import MatrixRows
from nybble.runtime.cpu_executor import CpuExecutor
from nybble.runtime.packed_cache import load_packed
from nybble.runtime.packed_file import write_packed
from nybble.runtime.packed_weights import FreshlyPacked, PackedSource

CASES: dict[str, tuple[str, dict[str, Any], tuple[int, int, bool, bool]]] = {
    "symmetric, tied": ("llama", {"tie_word_embeddings": True}, (4, 64, True, False)),
    "zero points, biases, windows, short group": (
        "qwen2",
        {"use_sliding_window": True, **MIXED},
        (4, 64, False, False),
    ),
    "8 bits, q and k norms": ("qwen3", {}, (8, 32, True, False)),
    "permuted, one group": ("llama", {}, (4, -1, False, True)),
    "permuted": ("qwen2", {"hidden_size": 80}, (8, 32, False, True)),
    "experts": ("mixtral", {"num_local_experts": 3}, (4, 32, False, True)),
}


def logits(source: PackedSource) -> NDArray[np.float32]:
    executor = CpuExecutor.from_packed(source, threads=2)
    result = paged_logits(executor, some_ids(source.spec.vocab_size))
    executor.close()
    return result


@pytest.mark.parametrize("case", CASES)
def test_the_same_logits_as_packed_afresh_and_no_weights_are_read(
    case: str, make_tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    family, overrides, packing = CASES[case]
    weights = quantized(load(make_tiny_model(family, **overrides)), *packing)
    executor = CpuExecutor(weights, threads=1)
    expected = paged_logits(executor, some_ids(weights.spec.vocab_size))
    executor.close()
    cold = load_packed(tmp_path, DIGEST, weights.spec, lambda: weights)
    assert np.array_equal(logits(cold), expected)
    assert np.array_equal(logits(mapped(tmp_path, weights)), expected)
    assert_same(mapped(tmp_path, weights), weights)
    assert names(tmp_path) == ["cache/packed.bin"]


def test_arrays_stay_valid_when_the_file_and_its_source_are_gone(weights: Weights, tmp_path: Path) -> None:
    expected = logits(FreshlyPacked(weights))
    source: PackedSource | None = load_packed(tmp_path, DIGEST, weights.spec, lambda: weights)
    assert source is not None
    executor = CpuExecutor.from_packed(source, threads=1)
    source = None
    (tmp_path / "cache/packed.bin").unlink()
    assert np.array_equal(paged_logits(executor, some_ids(weights.spec.vocab_size)), expected)
    executor.close()


def large(weights: Weights) -> Weights:
    """With an embedding of 26 MB that is quantized as it is read."""

    class Large(Weights):
        def matrix(self, name: str) -> MatrixRows | None:
            if name != self.spec.embedding_name:
                return super().matrix(name)
            return MatrixRows.of_head((self.spec.vocab_size, self.spec.hidden_size), some_rows)

    def some_rows(begin: int, end: int) -> QuantizedTensor:
        return quantize_head(np.ones((end - begin, weights.spec.hidden_size), np.float32))

    return Large(replace(weights.spec, vocab_size=400_000, tied_embeddings=True), weights.tensors)


def test_writing_holds_some_rows_of_a_matrix_and_never_all(weights: Weights, tmp_path: Path) -> None:
    file = tmp_path / "packed.bin"
    with file.open("wb") as output:
        tracemalloc.start()
        write_packed(output, FreshlyPacked(large(weights)), DIGEST)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert file.stat().st_size > 25_000_000
    assert peak < 16_500_000


def test_huge_pages_are_written_whole(weights: Weights, tmp_path: Path) -> None:
    """So that the page cache keeps the file in them."""
    written: list[tuple[int, int]] = []

    class Recorded(FileIO):
        def write(self, piece: Any) -> int:
            written.append((self.tell(), memoryview(piece).nbytes))
            return super().write(piece)

    file = tmp_path / "packed.bin"
    with Recorded(file, "wb") as output:
        write_packed(output, FreshlyPacked(large(weights)), DIGEST)
    whole = [(at, size) for at, size in written if size >= HUGE_PAGE]
    assert whole == [(i * HUGE_PAGE, HUGE_PAGE) for i in range(file.stat().st_size // HUGE_PAGE)]


@pytest.mark.parametrize("case", CASES)
def test_a_file_is_the_same_however_few_rows_are_packed_at_once(
    case: str, make_tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, overrides, packing = CASES[case]
    weights = quantized(load(make_tiny_model(family, **overrides)), *packing)
    for source in (weights, OtherHalf(weights)):
        files = []
        for elements in (1, 5000, 1 << 30):
            monkeypatch.setattr(packing_rows, "PIECE_ELEMENTS", elements)
            file = tmp_path / "packed.bin"
            with file.open("wb") as output:
                write_packed(output, FreshlyPacked(source), DIGEST)
            files.append(file.read_bytes())
        assert files[0] == files[1] == files[2]


def test_tensors_are_aligned_and_read_only(weights: Weights, tmp_path: Path) -> None:
    source = load_packed(tmp_path, DIGEST, weights.spec, lambda: weights)
    for name, shape in weights.spec.tensors().items():
        array = source.linear(name).tiles if len(shape) == 2 else source.vector(name)
        assert array.ctypes.data % 64 == 0
        assert not array.flags.writeable


class OtherHalf:
    """Weights as the GPTQ format gives them back, where a group's columns ascend."""

    def __init__(self, weights: Weights) -> None:
        self.spec, self._weights = weights.spec, weights

    def matrix(self, name: str) -> MatrixRows | None:
        tensor = self.tensor(name)
        return MatrixRows.of(tensor) if isinstance(tensor, QuantizedTensor) else None

    def tensor(self, name: str) -> LogicalTensor:
        tensor = self._weights.tensor(name)
        if not isinstance(tensor, QuantizedTensor) or tensor.permutation is None:
            return tensor
        parts = to_gptq(tensor, "gptq_v2")
        return from_gptq(
            parts["qweight"], parts["qzeros"], parts["scales"], parts["g_idx"],
            bits=tensor.bits, group_size=tensor.group_size, checkpoint_format="gptq_v2",
        )  # fmt: skip


@pytest.mark.parametrize("group_size", [64, 32, -1])
def test_both_halves_of_a_permuted_model_are_packed_alike(
    group_size: int, make_tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    weights = quantized(load(make_tiny_model("llama")), 4, group_size, False, True)
    load_packed(tmp_path, DIGEST, weights.spec, lambda: OtherHalf(weights))
    assert_same(mapped(tmp_path, weights), weights)
    assert np.array_equal(logits(mapped(tmp_path, weights)), logits(FreshlyPacked(weights)))
