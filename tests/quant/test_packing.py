"""The packed layouts, against slow loops written from each format's definition, and there and back."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from nybble.errors import ModelFormatError, QuantizationError
from nybble.quant.packing import (
    QuantizedTensor,
    from_gptq,
    from_matmulnbits,
    matmulnbits_block,
    pack_rows,
    quantize_head,
    to_gptq,
    to_matmulnbits,
    unpack_rows,
)


def make_tensor(
    bits: int, group_size: int, out: int, columns: int, symmetric: bool, permuted: bool, seed: int
) -> QuantizedTensor:
    random = np.random.default_rng(seed)
    size = columns if group_size == -1 else group_size
    groups = -(-columns // size)
    zeros = None
    if not symmetric:
        zeros = random.integers(1, 1 << bits, (out, groups)).astype(np.uint8)
        zeros[0, 0] = 1  # never the symmetric zero point everywhere
    return QuantizedTensor(
        packed=pack_rows(random.integers(0, 1 << bits, (out, columns)).astype(np.uint8), bits),
        scales=random.uniform(1e-3, 1, (out, groups)).astype(np.float16),
        zeros=zeros,
        bits=bits,
        group_size=size,
        in_features=columns,
        permutation=random.permutation(columns).astype(np.int32) if permuted else None,
    )


tensors = st.builds(
    make_tensor,
    bits=st.sampled_from([4, 8]),
    group_size=st.sampled_from([32, 64, 128, -1]),
    out=st.integers(1, 40),
    columns=st.integers(1, 300),
    symmetric=st.booleans(),
    permuted=st.booleans(),
    seed=st.integers(0, 1000),
)


def assert_same(found: QuantizedTensor, expected: QuantizedTensor) -> None:
    assert np.array_equal(found.packed, expected.packed)
    assert found.scales.dtype == np.float16
    assert np.array_equal(found.scales, expected.scales)
    assert (found.zeros is None) == (expected.zeros is None)
    assert np.array_equal(found.zero_points, expected.zero_points)
    assert (found.bits, found.group_size, found.in_features) == (
        expected.bits,
        expected.group_size,
        expected.in_features,
    )


def dequantized_by_loops(tensor: QuantizedTensor) -> NDArray[np.float32]:
    weight = np.zeros((tensor.out_features, tensor.in_features), np.float32)
    for n in range(tensor.out_features):
        for j in range(tensor.in_features):
            bit = j * tensor.bits
            code = int(tensor.packed[n, bit // 8]) >> bit % 8 & (1 << tensor.bits) - 1
            g = j // tensor.group_size
            zero = 1 << (tensor.bits - 1) if tensor.zeros is None else int(tensor.zeros[n, g])
            k = j if tensor.permutation is None else int(tensor.permutation[j])
            weight[n, k] = np.float32(code - zero) * np.float32(tensor.scales[n, g])
    return weight


def gptq_by_loops(layer: dict[str, Any], bits: int, offset: int) -> NDArray[np.float32]:
    """What AutoGPTQ's kernels compute: bits of Python integers, one weight at a time."""
    mask, per_word = (1 << bits) - 1, 32 // bits
    g_idx, scales = layer["g_idx"], layer["scales"]
    weight = np.zeros((scales.shape[1], len(g_idx)), np.float32)
    for n in range(weight.shape[0]):
        for k in range(weight.shape[1]):
            g = int(g_idx[k])
            code = int(layer["qweight"][k // per_word, n]) >> bits * (k % per_word) & mask
            zero = int(layer["qzeros"][g, n // per_word]) >> bits * (n % per_word) & mask
            weight[n, k] = np.float32(code - (zero + offset)) * np.float32(scales[g, n])
    return weight


@given(
    bits=st.sampled_from([4, 8]), rows=st.integers(0, 5), columns=st.integers(1, 70), seed=st.integers(0, 99)
)
def test_rows_round_trip(bits: int, rows: int, columns: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (rows, columns)).astype(np.uint8)
    packed = pack_rows(codes, bits)
    assert packed.shape == (rows, -(-columns * bits // 8))
    assert np.array_equal(unpack_rows(packed, bits, columns), codes)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("group_size", "columns"), [(32, 100), (64, 64), (-1, 33)])
@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
def test_layouts_mean_what_their_definitions_say(
    bits: int, group_size: int, columns: int, permuted: bool, symmetric: bool
) -> None:
    tensor = make_tensor(bits, group_size, 11, columns, symmetric, permuted, 5)
    expected = dequantized_by_loops(tensor)
    assert np.array_equal(tensor.dequantize(), expected)
    assert np.array_equal(gptq_by_loops(to_gptq(tensor, "gptq"), bits, 1), expected)
    assert np.array_equal(gptq_by_loops(to_gptq(tensor, "gptq_v2"), bits, 0), expected)


@pytest.mark.parametrize(("group_size", "columns"), [(32, 100), (64, 64), (-1, 33)])
@pytest.mark.parametrize("permuted", [False, True])
def test_minima_are_added(group_size: int, columns: int, permuted: bool) -> None:
    tensor = make_tensor(4, group_size, 11, columns, True, permuted, 5)
    minima = np.random.default_rng(6).uniform(-1, 1, tensor.scales.shape).astype(np.float16)
    tensor = replace(tensor, minima=minima)
    expected = np.zeros((11, columns), np.float32)
    for n, k in np.ndindex(11, columns):
        g = k // tensor.group_size
        to = k if tensor.permutation is None else tensor.permutation[k]
        code = np.float32(tensor.codes[n, k])
        expected[n, to] = code * np.float32(tensor.scales[n, g]) + np.float32(minima[n, g])
    assert np.array_equal(tensor.dequantize(), expected)


def test_minima_never_become_zero_points() -> None:
    tensor = make_tensor(4, 32, 4, 64, True, False, 0)
    tensor = replace(tensor, minima=np.zeros((4, 2), np.float16))
    for convert in (to_gptq, to_matmulnbits):
        with pytest.raises(QuantizationError, match="minima"):
            convert(tensor)


def test_gptq_shapes_fill_up_the_last_word() -> None:
    layer = to_gptq(make_tensor(4, 64, 13, 100, False, False, 0))
    assert {name: (a.shape, a.dtype.name) for name, a in layer.items()} == {
        "qweight": ((13, 13), "int32"),
        "qzeros": ((2, 2), "int32"),
        "scales": ((2, 13), "float16"),
        "g_idx": ((100,), "int32"),
    }


@given(tensor=tensors, checkpoint_format=st.sampled_from(["gptq", "gptq_v2"]), minus_one=st.booleans())
def test_gptq_round_trip(tensor: QuantizedTensor, checkpoint_format: Any, minus_one: bool) -> None:
    group_size = -1 if minus_one and tensor.group_size == tensor.in_features else tensor.group_size
    layer = to_gptq(tensor, checkpoint_format)
    found = from_gptq(**layer, bits=tensor.bits, group_size=group_size, checkpoint_format=checkpoint_format)
    assert np.array_equal(found.dequantize(), tensor.dequantize())
    if tensor.permutation is None:
        assert found.permutation is None
        assert_same(found, tensor)
    for name, array in to_gptq(found, checkpoint_format).items():
        assert np.array_equal(array, layer[name]), name


@given(tensor=tensors)
def test_matmulnbits_round_trip(tensor: QuantizedTensor) -> None:
    b, scales, zero_points = to_matmulnbits(tensor)
    found = from_matmulnbits(
        b,
        scales,
        zero_points,
        bits=tensor.bits,
        in_features=tensor.in_features,
        group_size=tensor.group_size,
        permutation=tensor.permutation,
    )
    assert_same(found, tensor)
    assert np.array_equal(found.dequantize(), tensor.dequantize())


@given(tensor=tensors)
def test_matmulnbits_means_the_same_weights_and_pads_with_zeros(tensor: QuantizedTensor) -> None:
    block = matmulnbits_block(tensor.group_size, tensor.in_features)
    assert block >= 16
    assert block & (block - 1) == 0
    b, scales, zero_points = to_matmulnbits(tensor)
    blocks = -(-tensor.in_features // block)
    assert b.shape == (tensor.out_features, blocks, block * tensor.bits // 8)
    codes = unpack_rows(b.reshape(len(b), -1), tensor.bits, blocks * block).astype(np.float32)
    if zero_points is None:
        zeros = np.full(scales.shape, 1 << (tensor.bits - 1), np.uint8)
    else:
        zeros = unpack_rows(zero_points, tensor.bits, blocks)
    weight = (codes.reshape(len(b), blocks, block) - zeros[:, :, None]) * scales[:, :, None]
    weight = weight.reshape(len(b), -1)
    stored = replace(tensor, permutation=None).dequantize()
    assert np.array_equal(weight[:, : tensor.in_features], stored)
    assert not weight[:, tensor.in_features :].any()


def test_matmulnbits_through_onnx_runtime() -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    helper = pytest.importorskip("onnx.helper")
    tensor = make_tensor(4, -1, 24, 100, False, False, 3)
    b, scales, zero_points = to_matmulnbits(tensor)
    inputs = {"B": b, "scales": scales, "zero_points": zero_points}
    node = helper.make_node(
        "MatMulNBits",
        ["x", *inputs],
        ["y"],
        domain="com.microsoft",
        K=100,
        N=24,
        bits=4,
        block_size=matmulnbits_block(100, 100),
    )
    graph = helper.make_graph(
        [node],
        "one",
        [helper.make_tensor_value_info("x", 1, [3, 100])],
        [helper.make_tensor_value_info("y", 1, [3, 24])],
        [
            helper.make_tensor(name, 1 if name == "scales" else 2, array.shape, array.tobytes(), raw=True)
            for name, array in inputs.items()
        ],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    x = np.random.default_rng(0).normal(size=(3, 100)).astype(np.float32)
    (found,) = session.run(None, {"x": x})
    assert np.allclose(found, x @ tensor.dequantize().T, atol=1e-4)


def test_zero_point_of_0_needs_gptq_v2() -> None:
    tensor = make_tensor(4, 32, 4, 64, False, False, 0)
    assert tensor.zeros is not None
    tensor.zeros[2, 1] = 0
    with pytest.raises(QuantizationError, match="gptq_v2"):
        to_gptq(tensor, "gptq")
    layer = to_gptq(tensor, "gptq_v2")
    found = from_gptq(**layer, bits=4, group_size=32, checkpoint_format="gptq_v2")
    assert_same(found, tensor)


def test_from_gptq_without_g_idx() -> None:
    tensor = make_tensor(4, 64, 6, 100, True, False, 0)
    layer = to_gptq(tensor) | {"g_idx": None}
    assert_same(from_gptq(**layer, bits=4, group_size=64, in_features=100), tensor)


def test_from_gptq_puts_the_short_group_last() -> None:
    tensor = make_tensor(4, 32, 5, 80, False, True, 1)
    layer = to_gptq(tensor)
    # The same weights with the groups named differently: the short one (16 columns) becomes number 0.
    renamed = np.array([1, 2, 0])
    layer["g_idx"] = renamed[layer["g_idx"]].astype(np.int32)
    for name in ("scales", "qzeros"):
        layer[name] = layer[name][np.argsort(renamed)]
    found = from_gptq(**layer, bits=4, group_size=32)
    assert np.array_equal(found.dequantize(), tensor.dequantize())


BAD_LAYERS: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"qweight": np.zeros((8, 5), np.int64)}, "dtype of qweight is int64; expected int32"),
    "scale dtype": ({"scales": np.ones((2, 5), np.float32)}, "dtype of scales is float32; expected float16"),
    "dimensions": ({"qzeros": np.zeros(2, np.int32)}, "shape of qzeros is [2]; expected two dimensions"),
    "rows": ({"qweight": np.zeros((7, 5), np.int32)}, "shape of qweight is [7, 5]; expected [8, 5]"),
    "groups": ({"scales": np.ones((3, 5), np.float16)}, "number of groups of scales is 3; expected 2"),
    "zeros": ({"qzeros": np.zeros((2, 2), np.int32)}, "shape of qzeros is [2, 2]; expected [2, 1]"),
    "scale": ({"scales": np.full((2, 5), np.inf, np.float16)}, "a scale is infinite or NaN"),
    "above": ({"g_idx": np.full(64, 2, np.int32)}, "a group in g_idx is 2; expected 0 to 1"),
    "below": ({"g_idx": np.full(64, -1, np.int32)}, "a group in g_idx is -1; expected 0 to 1"),
    "uneven": ({"g_idx": np.repeat(np.int32([0, 1]), [40, 24])}, "number of columns in g_idx is"),
    "g_idx dtype": ({"g_idx": np.zeros(64, np.int64)}, "g_idx is int64"),
    "empty": ({"g_idx": np.zeros(0, np.int32)}, "input size is 0"),
    "bits": ({"bits": 3}, "bits is 3; expected 4 or 8"),
    "group size": ({"group_size": 0}, "group_size is 0"),
    "format": ({"checkpoint_format": "marlin"}, "checkpoint_format is marlin"),
}


@pytest.mark.parametrize("case", BAD_LAYERS)
def test_from_gptq_names_what_is_wrong(case: str) -> None:
    changes, message = BAD_LAYERS[case]
    layer = to_gptq(make_tensor(4, 32, 5, 64, True, False, 0)) | {"bits": 4, "group_size": 32}
    with pytest.raises(ModelFormatError) as caught:
        from_gptq(**(layer | changes), name="layer 3")  # type: ignore[arg-type]
    assert "layer 3: " in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_from_matmulnbits_refuses_scales_that_are_not_float16() -> None:
    b, scales, zero_points = to_matmulnbits(make_tensor(4, 32, 5, 64, True, False, 0))
    with pytest.raises(ModelFormatError, match="float16"):
        from_matmulnbits(b, scales + 1e-7, zero_points, bits=4, in_features=64, group_size=32)
    with pytest.raises(ModelFormatError, match="expected uint8"):
        from_matmulnbits(b[:, :1], scales, zero_points, bits=4, in_features=64, group_size=32)


def test_other_group_sizes_as_matmulnbits_blocks() -> None:
    assert matmulnbits_block(96, 960) == 32
    with pytest.raises(ModelFormatError, match="group size 40"):
        matmulnbits_block(40, 400)


def test_head_is_round_to_nearest_of_the_float16_weight() -> None:
    weight = np.random.default_rng(0).normal(size=(70, 100)).astype(np.float32)
    head = quantize_head(weight)
    assert (head.bits, head.group_size, head.zeros) == (8, 32, None)
    codes = head.codes
    for n in range(70):
        for start in range(0, 100, 32):
            group = weight[n, start : start + 32].astype(np.float16).astype(np.float64)
            scale = np.float16(np.float32(np.abs(group).max()) / np.float32(127))
            assert head.scales[n, start // 32] == scale
            expected = np.rint(group / float(scale)) + 128
            assert np.array_equal(codes[n, start : start + 32], expected)


def test_head_of_zeros_and_of_tiny_numbers() -> None:
    weight = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    weight[0] = 0
    weight[1] *= 1e-5
    weight[2] *= 1e-7
    head = quantize_head(weight)
    assert np.isfinite(head.scales).all()
    assert (head.scales > 0).all()
    assert not head.dequantize()[0].any()
    half = weight.astype(np.float16).astype(np.float32)
    step = head.scales.astype(np.float32).repeat(32, axis=1)
    assert (np.abs(head.dequantize() - half) <= step / 2).all()


def test_head_does_not_depend_on_the_rows_around() -> None:
    weight = np.random.default_rng(0).normal(size=(40_000, 40)).astype(np.float32)
    whole, part = quantize_head(weight), quantize_head(weight[30_000:30_100])
    assert np.array_equal(whole.packed[30_000:30_100], part.packed)
    assert np.array_equal(whole.scales[30_000:30_100], part.scales)


@pytest.mark.parametrize("value", [np.inf, np.nan, 70_000.0])
def test_head_beyond_float16(value: float) -> None:
    weight = np.zeros((4, 32), np.float32)
    weight[2, 3] = value
    with pytest.raises(QuantizationError, match="lm_head"):
        quantize_head(weight, "lm_head.weight")
