"""Products with tiles of every kind: near a sum in double precision over the dequantized weight, and the same
bits in every instruction set."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoders import (
    Weights,
    load,
    mean_kl,
    paged_logits,
    read_config,
    some_ids,
    transformers_logits,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from nybble._kernels import multiply, supported_kernels
from nybble.errors import UnsupportedModelError
from nybble.models.spec import ModelSpec
from nybble.quant.packing import QuantizedTensor, pack_rows, quantize_head, unpack_rows
from nybble.quant.packing_nf4 import NF4_CODE_BOOK, Nf4Tensor, from_nf4
from nybble.quant.packing_rows import MatrixRows
from nybble.runtime.cpu_executor import CpuExecutor
from nybble.runtime.packed_cache import build_packed, open_packed
from nybble.runtime.packed_file import MappedWeights
from nybble.runtime.packed_weights import (
    HALVES,
    MINIMUM,
    NF4,
    SYMMETRIC,
    ZERO_POINT,
    PackedLinear,
    Packing,
    pack,
    tiles_bytes,
)

Tensor = QuantizedTensor | Nf4Tensor
DIGEST = "cd" * 32


def with_minima(weight: NDArray[np.float32], group_size: int = 32) -> QuantizedTensor:
    """Rounded to 16 levels between each group's extremes."""
    columns = weight.shape[1]
    groups = [weight[:, at : at + group_size] for at in range(0, columns, group_size)]
    minima = np.stack([g.min(axis=1) for g in groups], axis=1).astype(np.float16)
    highest = np.stack([g.max(axis=1) for g in groups], axis=1)
    scales = ((highest - minima) / 15).astype(np.float16)
    scales[scales == 0] = 1
    group = np.arange(columns) // group_size
    codes = np.rint((weight - minima[:, group].astype(np.float32)) / scales[:, group])
    packed = pack_rows(np.clip(codes, 0, 15).astype(np.uint8), 4)
    return QuantizedTensor(packed, scales, None, 4, group_size, columns, minima=minima)


def to_nf4(weight: NDArray[np.float32], blocksize: int = 64) -> Nf4Tensor:
    """As bitsandbytes quantizes: the nearest entry of the table, times the largest magnitude of a block."""
    blocks = weight.reshape(-1, blocksize)
    absmax = np.abs(blocks).max(axis=1)
    middles = (NF4_CODE_BOOK[1:] + NF4_CODE_BOOK[:-1]) / 2
    codes = np.searchsorted(middles, blocks / absmax[:, None]).astype(np.uint8)
    return from_nf4(codes.reshape(weight.shape), absmax, blocksize)


def in_bytes(tensor: Nf4Tensor) -> NDArray[np.float64]:
    """The weight with the table in whole 127ths, as the kernels have it."""
    table = np.rint(NF4_CODE_BOOK.astype(np.float64) * 127) / 127
    codes = unpack_rows(tensor.packed, 4, tensor.in_features)
    return np.asarray(table[codes] * tensor.scales.astype(np.float64).repeat(tensor.group_size, axis=1))


def products(x: NDArray[np.float32], linear: PackedLinear) -> NDArray[np.float32]:
    """x Wᵀ, the same in every instruction set and by both ways to compute it."""
    found = []
    for isa in supported_kernels():
        for panel in (False, True):
            y = np.full((len(x), -(-linear.rows // 16) * 16), np.nan, np.float32)
            multiply(
                x, linear.tiles, linear.rows, linear.bits, linear.kind, linear.slices_per_group, isa, panel, y
            )
            found.append(y)
    assert all(np.array_equal(y.view(np.uint32), found[0].view(np.uint32)) for y in found)
    assert not found[0][:, linear.rows :].any()
    return found[0][:, : linear.rows]


def rounded(x: NDArray[np.float32]) -> NDArray[np.float64]:
    """Activations as the kernels see them: 8 bits for each 32. The steps are theirs, in float32, so that none
    is rounded the other way."""
    padded = np.zeros((len(x), -(-x.shape[1] // 32) * 32), np.float32)
    padded[:, : x.shape[1]] = x
    slices = padded.reshape(len(x), -1, 32)
    scale = np.abs(slices).max(axis=2, keepdims=True) / np.float32(127)
    scale = ((scale.view(np.uint32) + 3) & ~np.uint32(3)).view(np.float32)  # up to 22 bits
    integers = np.rint(slices * (np.float32(1) / scale))
    values = integers.astype(np.float64) * scale
    return values.reshape(padded.shape)[:, : x.shape[1]]


def make(kind: int, rows: int, columns: int, group: int, seed: int) -> tuple[Tensor, NDArray[np.float64]]:
    """A random tensor of a kind, and the weight that its product should have."""
    random = np.random.default_rng(seed)
    weight = random.normal(size=(rows, columns)).astype(np.float32)
    if kind == MINIMUM:
        tensor = with_minima(weight, group)
        return tensor, tensor.dequantize().astype(np.float64)
    if kind == NF4:
        nf4 = to_nf4(weight, group)
        return nf4, in_bytes(nf4)
    codes = random.integers(0, 16, (rows, columns)).astype(np.uint8)
    scales = random.uniform(0.01, 0.1, (rows, -(-columns // group))).astype(np.float16)
    zeros = random.integers(0, 16, scales.shape).astype(np.uint8) if kind == ZERO_POINT else None
    whole = QuantizedTensor(pack_rows(codes, 4), scales, zeros, 4, group, columns)
    return whole, whole.dequantize().astype(np.float64)


@given(
    kind=st.sampled_from([SYMMETRIC, ZERO_POINT, MINIMUM, NF4]),
    rows=st.integers(1, 70),
    groups=st.integers(1, 5),
    group=st.sampled_from([32, 64, 128]),
    tokens=st.integers(1, 21),
    seed=st.integers(0, 999),
)
@settings(max_examples=60, deadline=None)
def test_a_product_is_that_of_the_dequantized_weight(
    kind: int, rows: int, groups: int, group: int, tokens: int, seed: int
) -> None:
    tensor, weight = make(kind, rows, groups * group, group, seed)
    linear = pack(tensor)
    assert linear.kind == kind or rows * groups < 4  # by chance every zero point may be in the middle
    assert linear.tiles.nbytes == tiles_bytes(rows, groups * group, 4, linear.kind, group // 32)
    x = np.random.default_rng(seed + 1).normal(size=(tokens, groups * group)).astype(np.float32)
    activations = rounded(x)
    room = 1e-5 * np.abs(activations) @ np.abs(weight).T
    assert (np.abs(products(x, linear) - activations @ weight.T) <= room).all()


@pytest.mark.parametrize("group_size", [64, 1000])
def test_minima_with_a_short_last_group_or_one_group(group_size: int) -> None:
    weight = np.random.default_rng(3).normal(size=(40, 104)).astype(np.float32)
    tensor = with_minima(weight, min(group_size, 104))
    x = np.random.default_rng(4).normal(size=(9, 104)).astype(np.float32)
    expected = rounded(x) @ tensor.dequantize().T
    assert np.allclose(products(x, pack(tensor)), expected, rtol=0, atol=1e-4)


@given(
    rows=st.integers(1, 200), columns=st.integers(1, 150), tokens=st.integers(1, 21), seed=st.integers(0, 999)
)
@settings(max_examples=40, deadline=None)
def test_a_head_gives_in_halves_what_it_gives_whole(rows: int, columns: int, tokens: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    head = quantize_head(random.normal(size=(rows, columns)).astype(np.float32))
    x = random.normal(size=(tokens, columns)).astype(np.float32)
    whole, halves = pack(head), pack(head, halves=True)
    assert (whole.kind, halves.kind) == (SYMMETRIC, HALVES)
    assert whole.tiles.nbytes == halves.tiles.nbytes
    assert np.array_equal(products(x, whole), products(x, halves))


def test_only_symmetric_codes_of_8_bits_have_halves() -> None:
    weight = np.random.default_rng(0).normal(size=(20, 64)).astype(np.float32)
    head = quantize_head(weight)
    order = replace(head, permutation=np.arange(64, dtype=np.int32)[::-1].copy())
    codes = QuantizedTensor(pack_rows(np.zeros((20, 64), np.uint8), 4), head.scales[:, :2], None, 4, 32, 64)
    for tensor in (codes, order, with_minima(weight)):
        with pytest.raises(UnsupportedModelError, match="head is not 8-bit symmetric"):
            pack(tensor, "head", halves=True)
    y, x = np.zeros((1, 16), np.float32), np.zeros((1, 32), np.float32)
    tiles = np.zeros(tiles_bytes(2, 32, 4, SYMMETRIC, 1), np.uint8)
    with pytest.raises(ValueError, match="no tile expresses"):
        multiply(x, tiles, 2, 4, HALVES, 1, "", False, y)


@pytest.mark.parametrize("code", [0, 15])
def test_the_largest_sums_do_not_saturate(code: int) -> None:
    """Bytes of 1 or 255 against activations of 127: two of those products fill 16 bits."""
    tensor = from_nf4(np.full((16, 128), code, np.uint8), np.ones(32, np.float32))
    x = np.full((5, 128), -2.0, np.float32)
    assert np.allclose(products(x, pack(tensor)), -2.0 * 128 * NF4_CODE_BOOK[code], rtol=1e-6)


def test_what_a_table_of_bytes_loses() -> None:
    """Of normally distributed weights: 0.6 % of their size, where NF4 itself loses 9 %.
    docs/kernel-notes.md has these figures."""
    weight = np.random.default_rng(0).normal(size=(256, 1024)).astype(np.float32)
    tensor = to_nf4(weight)
    exact, size = tensor.dequantize().astype(np.float64), np.sqrt((weight**2).mean())
    assert np.sqrt(((in_bytes(tensor) - exact) ** 2).mean()) / size == pytest.approx(0.0061, rel=0.05)
    assert np.sqrt(((exact - weight) ** 2).mean()) / size == pytest.approx(0.092, rel=0.05)
    x = np.random.default_rng(1).normal(size=(32, 1024)).astype(np.float32)
    y, expected = products(x, pack(tensor)), x.astype(np.float64) @ exact.T
    # Both roundings together, of weights and of activations.
    assert np.sqrt(((y - expected) ** 2).mean() / (expected**2).mean()) < 0.01


def test_minima_have_4_bits() -> None:
    tensor = QuantizedTensor(
        np.zeros((2, 32), np.uint8), np.ones((2, 1), np.float16), None, 8, 32, 32,
        minima=np.ones((2, 1), np.float16),
    )  # fmt: skip
    with pytest.raises(UnsupportedModelError, match="minima with 8 bits"):
        pack(tensor)
    y = np.zeros((1, 16), np.float32)
    for kind in (MINIMUM, NF4, 5, -1):
        tiles = np.zeros(tiles_bytes(2, 32, 8, SYMMETRIC, 1) + 32, np.uint8)
        with pytest.raises(ValueError, match="no tile expresses"):
            multiply(np.zeros((1, 32), np.float32), tiles, 2, 8, kind, 1, "", False, y)


class Mixed:
    """`PackedSource` and `PackingSource` of a model whose linear layers have minima or NF4; embedding
    and head have 8 bits."""

    def __init__(self, weights: Weights) -> None:
        self.spec: ModelSpec = weights.spec
        self.tensors: dict[str, Tensor | NDArray[np.float32]] = {}
        makers: list[Callable[[NDArray[np.float32]], Tensor]] = [with_minima, to_nf4]
        for name, values in weights.tensors.items():
            assert isinstance(values, np.ndarray)
            if name in (self.spec.embedding_name, self.spec.head_name):
                self.tensors[name] = quantize_head(values)
            else:
                self.tensors[name] = makers[len(self.tensors) % 2](values) if values.ndim == 2 else values

    def linear(self, name: str) -> PackedLinear:
        return self.packing(name).packed()

    def packing(self, name: str) -> Packing:
        tensor = self.tensors[name]
        assert not isinstance(tensor, np.ndarray)
        return Packing(MatrixRows.of(tensor), halves=name in (self.spec.embedding_name, self.spec.head_name))

    def vector(self, name: str) -> NDArray[np.float32]:
        tensor = self.tensors[name]
        assert isinstance(tensor, np.ndarray)
        return tensor

    def dequantized(self) -> Weights:
        values = {n: t if isinstance(t, np.ndarray) else t.dequantize() for n, t in self.tensors.items()}
        return Weights(self.spec, dict(values))


@pytest.fixture(scope="module")
def path(make_tiny_model: Callable[..., Path]) -> Path:
    return make_tiny_model("qwen2", intermediate_size=128, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def mixed(path: Path) -> Mixed:
    return Mixed(load(path))


def logits(source: Any, isa: str = "") -> NDArray[np.float32]:
    executor = CpuExecutor.from_packed(source, threads=2, isa=isa)
    found = paged_logits(executor, some_ids(source.spec.vocab_size))
    executor.close()
    return found


def test_a_model_of_minima_and_nf4_is_near_transformers(mixed: Mixed, path: Path) -> None:
    kinds = {mixed.linear(name).kind for name, shape in mixed.spec.tensors().items() if len(shape) == 2}
    assert kinds == {HALVES, MINIMUM, NF4}
    expected = transformers_logits(read_config(path), mixed.dequantized(), some_ids(mixed.spec.vocab_size))
    found = logits(mixed)
    assert mean_kl(expected, found) < 5e-3
    for isa in supported_kernels():
        assert np.array_equal(logits(mixed, isa), found)


def test_minima_and_nf4_come_back_from_a_file(mixed: Mixed, tmp_path: Path) -> None:
    file = tmp_path / "cache/packed.bin"
    build_packed(file, mixed, DIGEST)
    mapped = open_packed(file, mixed.spec, DIGEST)
    assert isinstance(mapped, MappedWeights)
    for name, shape in mixed.spec.tensors().items():
        if len(shape) == 2:
            one, other = mapped.linear(name), mixed.linear(name)
            assert one.kind == other.kind
            assert np.array_equal(one.tiles, other.tiles)
    assert np.array_equal(logits(mapped), logits(mixed))
