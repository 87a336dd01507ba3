"""`CpuExecutor` at odd sizes, and what the plan says of its sizes in memory."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from decoders import (
    Weights,
    mean_kl,
    paged_logits,
    quantized,
    some_ids,
)

from nybble._kernels import supported_kernels
from nybble.models.spec import MixtureSpec, ModelSpec, RopeSpec
from nybble.quant.packing import QuantizedTensor
from nybble.runtime.cpu_executor import CpuExecutor
from nybble.runtime.executor import KvDtype
from nybble.runtime.packed_weights import pack


@pytest.fixture(scope="module", params=["int16", "f16", "int8", "f32"])
def kv_dtype(request: pytest.FixtureRequest) -> KvDtype:
    kind: KvDtype = request.param
    return kind


def odd_spec(**sizes: Any) -> ModelSpec:
    """Sizes that fill no lane, slice or tile."""
    shape = {
        "vocab_size": 203,
        "hidden_size": 72,
        "intermediate_size": 90,
        "num_layers": 2,
        "num_heads": 6,
        "num_kv_heads": 3,
        "head_dim": 10,
        "max_position": 512,
    }
    shape |= sizes
    rope = RopeSpec(theta=10000.0, rotary_dim=6)
    windows = (None,) * shape["num_layers"]
    return ModelSpec(
        model_type="test", norm_eps=1e-5, rope=rope, qk_norm=True, sliding_windows=windows, **shape
    )


def random_weights(spec: ModelSpec, symmetric: bool, permuted: bool) -> Weights:
    rng = np.random.default_rng(6)
    tensors: Any = {
        name: (rng.normal(size=shape) * (shape[1] ** -0.5 if len(shape) == 2 else 1)).astype(np.float32)
        for name, shape in spec.tensors().items()
    }
    return quantized(Weights(spec, tensors), 4, 32, symmetric, permuted)


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("hidden_size", [40, 72, 90])
def test_sizes_that_fill_no_tile(hidden_size: int, permuted: bool) -> None:
    from nybble.runtime.ort_executor import OrtExecutor

    weights = random_weights(odd_spec(hidden_size=hidden_size), permuted, permuted)
    ids = some_ids(weights.spec.vocab_size, 40)
    with OrtExecutor.from_weights(weights, threads=1, accuracy_level=0) as reference:
        expected = paged_logits(reference, ids)
    for isa in supported_kernels():
        executor = CpuExecutor(weights, threads=2, isa=isa)
        found = paged_logits(executor, ids, 33)
        assert mean_kl(expected, found) < 5e-3
        assert np.array_equal(found, paged_logits(executor, ids, 3))
        executor.close()


@pytest.mark.parametrize("sharing", [(0, None, 0), (None, 0, 0), (0, 0, 1), (0, 1, None)])
def test_linear_layers_share_an_input_only_in_the_same_order(sharing: tuple[int | None, ...]) -> None:
    from nybble.runtime.ort_executor import OrtExecutor

    weights = random_weights(odd_spec(), False, False)
    columns = weights.spec.hidden_size
    orders = [np.random.default_rng(n).permutation(columns).astype(np.int32) for n in (1, 2)]
    for layer in range(weights.spec.num_layers):
        for linear, order in zip(weights.spec.linears(layer), sharing, strict=False):  # q, k and v come first
            tensor = weights.tensors[linear.name]
            assert isinstance(tensor, QuantizedTensor)
            if order is not None:
                weights.tensors[linear.name] = replace(tensor, permutation=orders[order])
    ids = some_ids(weights.spec.vocab_size, 40)
    with OrtExecutor.from_weights(weights, threads=1, accuracy_level=0) as reference:
        expected = paged_logits(reference, ids)
    executor = CpuExecutor(weights, threads=2)
    assert mean_kl(expected, paged_logits(executor, ids, 33)) < 5e-3
    executor.close()


def test_a_permutation_of_very_many_columns() -> None:
    spec = odd_spec(hidden_size=32, intermediate_size=90_000, num_layers=1)
    weights = random_weights(spec, True, True)
    ids = some_ids(spec.vocab_size, 40)
    one, many = (CpuExecutor(weights, threads=threads) for threads in (1, 8))
    assert np.array_equal(paged_logits(one, ids, 33), paged_logits(many, ids, 33))
    one.close()
    many.close()


MIXTURE = MixtureSpec((1,), 5, 2, 40, True, 56)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("bits", "group_size", "symmetric"), [(4, 32, False), (4, -1, True), (8, 64, False)])
def test_the_plan_counts_the_bytes_that_are_held(
    bits: int, group_size: int, symmetric: bool, tied: bool, kv_dtype: KvDtype
) -> None:
    from nybble.devices import RunSettings, load_profile, plan_memory
    from nybble.quant.recipe import Recipe

    spec = replace(odd_spec(), tied_embeddings=tied, norm_placement="around" if tied else "before")
    spec = replace(spec, mixture=MIXTURE if tied else None)
    tensors: Any = {name: np.ones(shape, np.float32) for name, shape in spec.tensors().items()}
    weights = quantized(Weights(spec, tensors), bits, group_size, symmetric, False)
    held = sum(
        pack(tensor).tiles.nbytes if isinstance(tensor, QuantizedTensor) else 4 * tensor.size
        for tensor in weights.tensors.values()
    )
    recipe = Recipe(bits=bits, group_size=group_size, symmetric=symmetric)
    profile = replace(load_profile("laptop-cpu"), page_size=256)
    plan = plan_memory(
        RunSettings(spec, recipe, profile, context=70, sequences=3, kv_dtype=kv_dtype, executor="cpu")
    )
    executor = CpuExecutor(weights, threads=1)
    executor.allocate_kv(plan.num_pages, plan.page_size, plan.kv_dtype)
    assert (plan.weights, plan.num_pages) == (held, 15)
    assert plan.kv == plan.num_pages * executor.kv_layout.bytes_per_block
    executor.close()


@pytest.mark.parametrize("threads", [1, 5])
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"num_heads": 8, "num_kv_heads": 1, "head_dim": 96},
        {"window_rope": RopeSpec(1e4, 10), "sliding_windows": (8, None)},
        {"mixture": MIXTURE},
        {"mixture": MixtureSpec((0, 1), 20, 3, 140, False)},
    ],
)
def test_the_plan_counts_the_buffers_of_a_step(sizes: dict[str, Any], threads: int) -> None:
    from nybble.devices import RunSettings, load_profile
    from nybble.devices.cpu_memory import step_bytes
    from nybble.quant.recipe import Recipe

    spec = replace(odd_spec(), qk_norm=False, max_position=1 << 16, **sizes)
    tensors: Any = {name: np.ones(shape, np.float32) for name, shape in spec.tensors().items()}
    weights = quantized(Weights(spec, tensors), 4, 32, True, False)
    run = RunSettings(
        spec, Recipe(), load_profile("laptop-cpu"),
        context=50_000, sequences=20, token_budget=99, threads=threads, executor="cpu",
    )  # fmt: skip
    executor = CpuExecutor(weights, threads=threads, max_position=run.length)
    executor._decoder.reserve(run.tokens, run.sequences, run.logit_rows)
    held, planned = executor._decoder.step_bytes, step_bytes(run)
    assert held <= planned <= held + threads * (256 << 10)  # the scratch of small models is a bound
    executor.close()
