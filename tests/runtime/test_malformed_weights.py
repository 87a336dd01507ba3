"""Weights, and numbers about them, that do not fit are refused by the extension with the argument's name, and
nothing is read or written outside them: `make sanitize` runs this file under AddressSanitizer.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from damaged_arrays import Rule, malformed
from decoders import UNUSUAL
from hypothesis import given, settings
from hypothesis import strategies as st

from nybble import _kernels
from nybble.quant.packing import quantize_head
from nybble.runtime.cpu_executor import _config
from nybble.runtime.packed_weights import HALVES, SYMMETRIC, PackedLinear, pack

SPEC = replace(UNUSUAL, num_layers=2, sliding_windows=(9, None), qkv_bias=True, qk_norm=True)


def linear(rows: int, columns: int) -> PackedLinear:
    values = np.random.default_rng(rows).normal(size=(rows, columns)).astype(np.float32)
    return pack(quantize_head(values))


@dataclass(frozen=True)
class Call:
    """A call of the extension that succeeds, and the rules of its arrays."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    rules: dict[str, Rule]
    optional: tuple[str, ...] = ()


LAYER_NORMS = ("before_attention", "after_attention", "before_mlp", "after_mlp")


def extension_calls() -> dict[str, Call]:
    builder = _kernels.DecoderBuilder(_config(SPEC, SPEC.max_position))
    hidden, q = SPEC.hidden_size, SPEC.num_heads * SPEC.head_dim
    assert (hidden // 32, q % 16) == (1, 8)  # two slices; the last tile is not full
    weight, ends = linear(q, hidden), linear(SPEC.vocab_size, hidden)
    ones = np.ones(hidden, np.float32)
    head_ones = np.ones(SPEC.head_dim, np.float32)
    x = np.ones((6, hidden), np.float32)
    y = np.zeros((6, -(-q // 16) * 16), np.float32)
    return {
        "set_linear": Call(
            builder.set_linear,
            {
                "layer": 0,
                "index": 0,
                "tiles": weight.tiles,
                "bits": weight.bits,
                "kind": weight.kind,
                "slices_per_group": weight.slices_per_group,
                "bias": np.ones(q, np.float32),
                "permutation": np.arange(hidden, dtype=np.int32)[::-1].copy(),
            },
            {"tiles": Rule(), "bias": Rule(), "permutation": Rule(0, hidden)},
            optional=("bias", "permutation"),
        ),
        "set_norms": Call(
            builder.set_norms,
            {"layer": 1, **dict.fromkeys(LAYER_NORMS, ones), "q": head_ones, "k": head_ones},
            {name: Rule() for name in (*LAYER_NORMS, "q", "k")},
            optional=(*LAYER_NORMS, "q", "k"),
        ),
        "set_ends": Call(
            builder.set_ends,
            {
                "norm": ones,
                "embedding": ends.tiles,
                "embedding_slices": ends.slices_per_group,
                "head": ends.tiles,
                "head_slices": ends.slices_per_group,
            },
            {"norm": Rule(), "embedding": Rule(), "head": Rule()},
        ),
        "multiply": Call(
            _kernels.multiply,
            {
                "x": x,
                "tiles": weight.tiles,
                "rows": weight.rows,
                "bits": weight.bits,
                "kind": weight.kind,
                "slices_per_group": weight.slices_per_group,
                "isa": "",
                "panel": True,
                "y": y,
            },
            {"x": Rule(), "tiles": Rule(), "y": Rule(axes=(0, 1))},
        ),
    }


CALLS = extension_calls()


@given(data=st.data())
@settings(max_examples=200, deadline=None)
@pytest.mark.parametrize(("call", "name"), [(c, name) for c, call in CALLS.items() for name in call.rules])
def test_the_extension_converts_no_array_and_names_what_does_not_fit(
    call: str, name: str, data: st.DataObject
) -> None:
    valid = CALLS[call]
    valid.function(**valid.arguments)
    kind, damaged = data.draw(malformed(valid.arguments[name], valid.rules[name], name in valid.optional))
    with pytest.raises((ValueError, TypeError)) as raised:
        valid.function(**{**valid.arguments, name: damaged})
    names = list(valid.rules) if kind == "length" else [name]
    assert any(found in str(raised.value) for found in names)


@given(data=st.data())
@settings(max_examples=200, deadline=None)
@pytest.mark.parametrize("call", [name for name in CALLS if name != "set_norms"])
def test_numbers_that_do_not_describe_the_tiles_are_refused(call: str, data: st.DataObject) -> None:
    valid = CALLS[call]
    numbers = {"bits", "kind", "slices_per_group", "rows", "embedding_slices", "head_slices"}
    name = data.draw(st.sampled_from(sorted(numbers & valid.arguments.keys())))
    values = st.one_of(st.integers(-9, 99), st.integers(-(1 << 31), (1 << 31) - 1))
    unit = 16 if name == "rows" else 1  # rows are stored in whole tiles
    right = valid.arguments[name]
    # Symmetric 8 bits take as much room in halves.
    alike = {SYMMETRIC, HALVES} if name == "kind" and right in (SYMMETRIC, HALVES) else set()
    value = data.draw(values.filter(lambda n: -(-n // unit) != -(-right // unit) and n not in alike))
    with pytest.raises(ValueError, match=r"^(tiles|embedding|head) "):
        valid.function(**{**valid.arguments, name: value})


@pytest.mark.parametrize(("name", "value"), [("layer", -1), ("layer", 2), ("index", -1), ("index", 7)])
def test_layers_and_their_parts_are_in_range(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=name):
        CALLS["set_linear"].function(**{**CALLS["set_linear"].arguments, name: value})


def test_a_decoder_that_lacks_weights_is_refused() -> None:
    for name, missing in (("set_linear", "lacks a linear layer"), ("set_norms", "lacks a linear layer")):
        calls = extension_calls()
        calls[name].function(**calls[name].arguments)
        with pytest.raises(ValueError, match=missing):
            _kernels.Decoder(calls[name].function.__self__, 1, "")
