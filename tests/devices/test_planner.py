import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planned import INT4, LAPTOP, SMOLLM2

from nybble.devices import (
    RunSettings,
    check_fit,
    fit_sequences,
    kv_bytes_per_token,
    load_profile,
    plan_memory,
    weight_bytes,
)
from nybble.errors import DoesNotFitError, SettingError
from nybble.quant.recipe import Recipe


def test_weights_of_an_unquantized_model_are_its_parameters():
    """SmolLM2-135M has 134,515,008 parameters."""
    assert weight_bytes(SMOLLM2, None) == 4 * 134_515_008


def test_weights_of_a_quantized_model_are_what_numpy_allocates():
    group, total = 64, 0
    for name, shape in SMOLLM2.tensors().items():
        if len(shape) == 1:
            total += np.empty(shape, np.float16).nbytes
        elif name == SMOLLM2.embedding_name:
            total += (
                np.empty(shape, np.uint8).nbytes + np.empty((shape[0], shape[1] // 32), np.float16).nbytes
            )
        else:
            total += np.empty((shape[0], shape[1] // 2), np.uint8).nbytes
            total += np.empty((shape[0], shape[1] // group), np.float16).nbytes
    assert weight_bytes(SMOLLM2, INT4) == total


def test_zero_points_and_an_untied_head_are_counted():
    rows = sum(shape[0] * shape[1] for shape in SMOLLM2.tensors().values() if len(shape) == 2)
    blocks = (rows - 49152 * 576) // 64
    asymmetric = weight_bytes(SMOLLM2, replace(INT4, symmetric=False)) - weight_bytes(SMOLLM2, INT4)
    assert blocks / 2 <= asymmetric <= blocks / 2 * 1.15  # an odd number of blocks fills its last byte
    untied = weight_bytes(replace(SMOLLM2, tied_embeddings=False), INT4) - weight_bytes(SMOLLM2, INT4)
    assert untied == 49152 * (576 + 18 * 2)


@pytest.mark.parametrize(
    ("kv_dtype", "expected"), [("f32", 46080), ("f16", 23040), ("int16", 23760), ("int8", 12240)]
)
def test_bytes_of_a_token_in_the_cache(kv_dtype, expected):
    assert kv_bytes_per_token(SMOLLM2, kv_dtype) == expected


def test_the_cache_is_whole_pages():
    plan = plan_memory(RunSettings(SMOLLM2, INT4, LAPTOP, context=17, sequences=3))
    assert plan.num_pages == 6
    assert plan.kv == 6 * 16 * 46080


# Peak resident memory in MB of OrtExecutor (ONNX Runtime 1.32, x86-64, two threads) over graphs of these
# shapes with random weights: prefill in chunks to the end of the context, then decodes; no tokenizer.
# test_planner_measured.py measures one of them anew.
MID = replace(
    SMOLLM2, vocab_size=32000, hidden_size=1024, intermediate_size=2816, num_layers=16, num_heads=16,
    num_kv_heads=4, tied_embeddings=False,
)  # fmt: skip
WIDE = replace(
    SMOLLM2, vocab_size=60000, hidden_size=896, intermediate_size=4864, num_layers=24, num_heads=14,
    num_kv_heads=2, qkv_bias=True,
)  # fmt: skip
MEASURED = [
    (SMOLLM2, INT4, "onnx", 8192, 512, 1, "f32", 964),
    (SMOLLM2, INT4, "onnx", 2048, 256, 4, "f32", 712),
    (SMOLLM2, INT4, "onnx", 4096, 128, 1, "f32", 512),
    (SMOLLM2, INT4, "onnx", 4096, 512, 1, "f16", 551),
    (MID, Recipe(bits=4, group_size=32), "onnx", 2048, 512, 1, "f32", 587),
    (WIDE, Recipe(bits=4, group_size=128, symmetric=False), "onnx", 4096, 256, 1, "f32", 707),
    (SMOLLM2, Recipe(bits=8, group_size=64), "onnx", 1024, 256, 1, "f32", 411),
    (MID, Recipe(bits=4, group_size=32), "gptq", 2048, 512, 1, "f32", 805),
    (SMOLLM2, INT4, "gptq", 1024, 256, 1, "f32", 468),
    (SMOLLM2, INT4, "onnx", 1024, 256, 1, "f32", 358),
    (SMOLLM2, INT4, "onnx", 4096, 512, 1, "f32", 656),
]


@pytest.mark.parametrize(
    ("spec", "recipe", "half", "context", "chunk", "sequences", "kv_dtype", "peak"), MEASURED
)
def test_the_predicted_peak_is_near_the_measured_one(
    spec, recipe, half, context, chunk, sequences, kv_dtype, peak
):
    plan = plan_memory(
        RunSettings(
            spec,
            recipe,
            LAPTOP,
            context=context,
            sequences=sequences,
            kv_dtype=kv_dtype,
            half=half,
            token_budget=chunk,
        )
    )
    predicted = plan.total - 650 * spec.vocab_size
    assert predicted == pytest.approx(peak * 1e6, rel=0.2)


def test_a_model_that_fits_is_planned_within_the_budget():
    plan = check_fit(RunSettings(SMOLLM2, INT4, LAPTOP))
    assert plan.context == 8192
    assert plan.budget == LAPTOP.memory_budget
    assert plan.total <= plan.budget


def test_a_budget_too_small_is_refused_with_the_numbers_and_what_would_fit():
    with pytest.raises(DoesNotFitError) as caught:
        check_fit(RunSettings(SMOLLM2, INT4, LAPTOP, context=8192, budget=600_000_000))
    message = str(caught.value)
    assert "\n" not in message
    for part in (
        "memory budget is 600 MB",
        "weights",
        "KV cache 377 MB for 8192 tokens in f32",
        "interpreter",
    ):
        assert part in message
    found = re.search(r"what would fit: a context of (\d+) tokens \(", message)
    assert found
    longest = int(found[1])
    assert check_fit(RunSettings(SMOLLM2, INT4, LAPTOP, context=longest, budget=600_000_000)).fits
    assert not plan_memory(RunSettings(SMOLLM2, INT4, LAPTOP, context=longest + 1, budget=600_000_000)).fits


def test_fewer_sequences_are_named_where_they_would_help():
    with pytest.raises(DoesNotFitError, match=r"what would fit: one sequence at a time \([34]\d\d MB\)"):
        check_fit(RunSettings(SMOLLM2, INT4, LAPTOP, context=512, sequences=500, budget=420_000_000))


def test_as_many_sequences_as_fit():
    settings = {"context": 512, "budget": 600_000_000}
    plan = fit_sequences(RunSettings(SMOLLM2, INT4, LAPTOP, **settings), 64)
    assert 1 < plan.sequences < 64
    assert plan.fits
    assert not plan_memory(RunSettings(SMOLLM2, INT4, LAPTOP, sequences=plan.sequences + 1, **settings)).fits
    assert fit_sequences(RunSettings(SMOLLM2, INT4, LAPTOP, **settings), 2).sequences == 2
    with pytest.raises(DoesNotFitError, match="512 tokens"):
        fit_sequences(RunSettings(SMOLLM2, INT4, LAPTOP, context=512, budget=300_000_000), 64)


def test_rows_that_no_context_reaches_are_not_counted():
    """A step has no more tokens than all sequences' contexts, whatever the budget of tokens."""

    def activations(tokens, sequences=1):
        run = RunSettings(
            SMOLLM2, INT4, LAPTOP, context=64, sequences=sequences, executor="cpu", token_budget=tokens
        )
        return plan_memory(run).activations

    assert activations(512) == activations(64) > activations(32)
    assert activations(512, sequences=2) > activations(64, sequences=2)


@pytest.mark.parametrize(("threads", "sequences", "more"), [(2, 8, 0), (8, 1, 0), (8, 4, 2), (8, 16, 6)])
def test_each_thread_that_chooses_tokens_has_room_for_a_vocabulary(threads, sequences, more, monkeypatch):
    run = RunSettings(SMOLLM2, INT4, LAPTOP, sequences=sequences, threads=threads, executor="cpu")
    whole = plan_memory(run).activations
    monkeypatch.setattr("nybble.devices.cpu_memory.SAMPLER_PER_TOKEN", 0)
    assert whole - plan_memory(run).activations == more * 16 * SMOLLM2.vocab_size


def test_a_budget_that_no_context_fits_says_so():
    with pytest.raises(DoesNotFitError, match="no context would fit, since one token needs"):
        check_fit(RunSettings(SMOLLM2, INT4, LAPTOP, budget=100_000_000))


def test_without_a_budget_everything_fits():
    assert check_fit(RunSettings(SMOLLM2, None, replace(LAPTOP, memory_budget=None), sequences=10_000)).fits


def test_a_model_with_a_shorter_context_than_the_profile_keeps_its_own():
    assert plan_memory(RunSettings(replace(SMOLLM2, max_position=2048), INT4, LAPTOP)).context == 2048
    assert plan_memory(RunSettings(SMOLLM2, INT4, load_profile("raspberry-pi-5"))).context == 4096


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"context": 0}, "context is 0"), ({"context": 9000}, "8192"), ({"sequences": 0}, "sequences is 0")],
)
def test_settings_out_of_range(settings, message):
    with pytest.raises(SettingError, match=message):
        plan_memory(RunSettings(SMOLLM2, INT4, LAPTOP, **settings))


@given(
    context=st.integers(1, 8191),
    sequences=st.integers(1, 50),
    bits=st.sampled_from([4, 8]),
    group_size=st.sampled_from([32, 64, 128, -1]),
    half=st.sampled_from(["onnx", "gptq"]),
)
def test_more_never_needs_less(context, sequences, bits, group_size, half):
    recipe = Recipe(bits=bits, group_size=group_size)

    def total(context: int, sequences: int, kv_dtype: str = "f32") -> int:
        settings = {"context": context, "sequences": sequences, "kv_dtype": kv_dtype, "half": half}
        return plan_memory(RunSettings(SMOLLM2, recipe, LAPTOP, **settings)).total

    assert total(context, sequences) <= total(context + 1, sequences)
    assert total(context, sequences) <= total(context, sequences + 1)


def test_memory_of_a_gpu_holds_no_interpreter():
    plan = check_fit(RunSettings(SMOLLM2, INT4, load_profile("gpu-8gb")))
    assert (plan.runtime, plan.packed) == (0, 0)
    assert plan.kv == 8192 * 23040
