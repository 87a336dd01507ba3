"""bitsandbytes' methods and layouts, against their definitions and against what bitsandbytes itself gives.

`data/bnb.npz` is bitsandbytes', made by `make_bnb_golden.py`.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bnb_checkpoints import NF4, int8_tensors, nf4_tensors
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from nybble.errors import NybbleError, QuantizationError, SettingError, UnsupportedModelError
from nybble.quant.bnb import quantize_int8, quantize_nf4
from nybble.quant.packing_bnb import STATE, Nf4State, from_bnb_int8, from_bnb_nf4, to_bnb_int8, to_bnb_nf4
from nybble.quant.recipe import Recipe

WEIGHT = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def golden() -> dict[str, NDArray[Any]]:
    with np.load(Path(__file__).parent / "data" / "bnb.npz", allow_pickle=False) as arrays:
        return dict(arrays)


def random_weight(seed: int, rows: int, columns: int) -> NDArray[np.float32]:
    random = np.random.default_rng(seed)
    return (random.normal(size=(rows, columns)) * random.uniform(1e-3, 2, (rows, 1))).astype(np.float32)


def read_nf4(stored: dict[str, NDArray[Any]], prefix: str, shape: tuple[int, int]) -> NDArray[np.float32]:
    """What stored tensors mean to us: a weight [out, in]."""
    state = Nf4State.from_bytes(stored[f"{prefix}.{STATE}"].tobytes(), shape, "w")
    absmax = stored[f"{prefix}.absmax"]
    if state.nested is not None:
        absmax = state.nested.absmax(
            absmax, 0, stored[f"{prefix}.nested_quant_map"], stored[f"{prefix}.nested_absmax"]
        )
    return from_bnb_nf4(stored[prefix], absmax, shape[1], state.blocksize, "w").dequantize()


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.sampled_from([64, 128, 192]), st.booleans())
def test_a_brute_force_writer_is_read(seed: int, rows: int, columns: int, double: bool) -> None:
    weight = random_weight(seed, rows, columns)
    stored, meant = nf4_tensors(WEIGHT, weight, 64, double)
    found = read_nf4(stored, WEIGHT, (rows, columns))
    assert np.allclose(found, meant, rtol=2**-11, atol=2**-25)  # scales in float16


@pytest.mark.parametrize("kind", ["nf4", "double"])
def test_what_bitsandbytes_writes_means_what_it_says(golden: dict[str, NDArray[Any]], kind: str) -> None:
    found = read_nf4(golden, kind, golden["weight"].shape)
    assert np.allclose(found, golden[f"{kind}.meant"], rtol=2**-11 + 1e-6, atol=0)


def test_codes_are_those_of_bitsandbytes(golden: dict[str, NDArray[Any]]) -> None:
    """But for weights near the middle of two: the scales in float16 move those."""
    tensor = quantize_nf4(torch.from_numpy(golden["weight"]).float(), 64, "w")
    stored = to_bnb_nf4(tensor)
    assert stored[""].shape == golden["nf4"].shape
    assert np.mean(stored[""] != golden["nf4"]) < 2e-3
    assert np.allclose(stored[".absmax"], golden["nf4.absmax"], rtol=2**-11, atol=0)
    assert np.array_equal(stored[".quant_map"], golden["nf4.quant_map"])
    state = {key: json.loads(value.tobytes()) for key, value in
             (("ours", stored[f".{STATE}"]), ("theirs", golden[f"nf4.{STATE}"]))}  # fmt: skip
    assert state["ours"] | {"dtype": None} == state["theirs"] | {"dtype": None}


def test_int8_is_that_of_bitsandbytes(golden: dict[str, NDArray[Any]]) -> None:
    found = from_bnb_int8(golden["int8"], golden["int8.SCB"], "w").dequantize()
    assert np.allclose(found, golden["int8.meant"], rtol=2**-11 + 1e-6, atol=0)
    stored = to_bnb_int8(quantize_int8(torch.from_numpy(golden["weight"]).float(), "w"))
    assert np.abs(stored["weight"].astype(int) - golden["int8"]).max() <= 1
    assert np.mean(stored["weight"] != golden["int8"]) < 0.05
    assert np.allclose(stored["SCB"], golden["int8.SCB"], rtol=2**-11, atol=0)


@given(
    st.integers(0, 2**32 - 1), st.integers(1, 5), st.sampled_from([64, 128, 256]), st.sampled_from([64, 128])
)
def test_nf4_is_the_nearest_entry_and_comes_back(seed: int, rows: int, columns: int, blocksize: int) -> None:
    columns = max(columns, blocksize)
    weight = random_weight(seed, rows, columns)
    tensor = quantize_nf4(torch.from_numpy(weight), blocksize, "w")
    scale = np.repeat(tensor.scales.astype(np.float64), blocksize, axis=1)
    nearest = np.abs(weight[..., None] / scale[..., None] - np.array(NF4)).min(axis=2)
    assert np.allclose(np.abs(weight - tensor.dequantize()), nearest * scale, atol=1e-6 * scale.max())
    largest = np.abs(weight).reshape(rows, -1, blocksize).max(axis=2)
    assert np.allclose(tensor.scales, largest, rtol=2**-11, atol=0)
    stored = to_bnb_nf4(tensor)
    back = from_bnb_nf4(stored[""], stored[".absmax"], columns, blocksize, "w")
    assert np.array_equal(back.packed, tensor.packed)
    assert np.array_equal(back.scales, tensor.scales)


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 70))
def test_int8_is_the_nearest_code_and_comes_back(seed: int, rows: int, columns: int) -> None:
    weight = random_weight(seed, rows, columns)
    tensor = quantize_int8(torch.from_numpy(weight), "w")
    scale = tensor.scales.astype(np.float32)
    expected = np.clip(np.rint(weight / scale), -127, 127) * scale
    assert np.array_equal(tensor.dequantize(), expected)
    stored = to_bnb_int8(tensor)
    # As LLM.int8() has it: 127 stands for a row's SCB.
    meant = stored["weight"].astype(np.float32) * (stored["SCB"][:, None] / np.float32(127))
    assert np.array_equal(meant, expected)
    back = from_bnb_int8(stored["weight"], stored["SCB"], "w")
    assert np.array_equal(back.packed, tensor.packed)
    assert np.array_equal(back.scales, tensor.scales)
    theirs, dequantized = int8_tensors(WEIGHT, weight)
    scb = theirs[WEIGHT.removesuffix("weight") + "SCB"]
    found = from_bnb_int8(theirs[WEIGHT], scb, "w").dequantize()
    assert np.allclose(found, dequantized, rtol=2**-10, atol=127 * 2**-25)  # float16 is coarse below 2⁻¹⁴


def test_zeros_and_extremes() -> None:
    weight = torch.zeros((4, 64))
    weight[1] = 1e-9
    weight[2] = 6e4
    for tensor in (quantize_nf4(weight, 64, "w"), quantize_int8(weight, "w")):
        values = tensor.dequantize()
        assert np.isfinite(values).all()
        assert not values[0].any()
        assert not values[3].any()
        assert np.abs(values[1]).max() <= 2**-24
        assert np.allclose(values[2], 6e4, rtol=2**-10)
    with pytest.raises(QuantizationError, match="w: reaches 70000"):
        quantize_nf4(torch.full((2, 64), 7e4), 64, "w")
    with pytest.raises(QuantizationError, match=r"w: element \[0, 3\] is nan"):
        quantize_int8(torch.tensor([[0.0, 1.0, 2.0, float("nan")]]), "w")
    with pytest.raises(UnsupportedModelError, match="w: has rows of 96; method nf4 has whole blocks of 64"):
        quantize_nf4(torch.ones((2, 96)), 64, "w")


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (b"", "not valid JSON"),
        (b"[]", "a JSON list"),
        (b'{"quant_type": "fp4"}', "quant_type is 'fp4'; expected 'nf4'"),
        ({"shape": [4, 64]}, "shape is [4, 64]; expected [2, 128]"),
        ({"blocksize": 0}, "blocksize is 0; expected a positive size"),
        ({"blocksize": True}, "blocksize is True"),
        ({"blocksize": 256}, "blocks of 256 in rows of 128; expected whole blocks"),
        ({"nested_blocksize": -1, "nested_offset": 0}, "nested_blocksize is -1"),
        ({"nested_blocksize": 256}, "nested_offset is None; expected a number"),
        ({"nested_blocksize": 256, "nested_offset": 10**400}, "nested_offset is 1000"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_a_state_that_cannot_be_is_named(state: Any, message: str) -> None:
    if isinstance(state, dict):
        sound = {"quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": [2, 128]}
        state = json.dumps(sound | state).encode()
    with pytest.raises(NybbleError) as caught:
        Nf4State.from_bytes(state, (2, 128), "file: w")
    assert str(caught.value).startswith("file: w: ")
    assert message in str(caught.value)


def test_a_method_has_settings_of_its_own() -> None:
    assert Recipe().changed(method="nf4") == Recipe("nf4", 4, 64, True, clip_search=False)
    assert Recipe().changed(method="nf4", group_size=128).group_size == 128
    assert Recipe().changed(method="int8", seed=3) == Recipe("int8", 8, -1, True, clip_search=False, seed=3)
    assert Recipe().changed(bits=8) == Recipe(bits=8)
    with pytest.raises(SettingError, match="group_size is 32; expected 64 or 128 with method nf4"):
        Recipe().changed(method="nf4", group_size=32)
    with pytest.raises(SettingError, match="bits is 4; expected 8 with method int8"):
        Recipe().changed(method="int8", bits=4)
    with pytest.raises(SettingError, match="symmetric is False; expected True with method int8"):
        Recipe().changed(method="int8", symmetric=False)
