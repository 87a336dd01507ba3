"""Experts of mixtures that are read when they are chosen: the bits of resident ones in any number of slots,
and no more bytes than those of the experts that were not there."""

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoders import MIXTURE, load, quantized
from forked import in_child
from hypothesis import given, settings
from hypothesis import strategies as st
from streamed_models import LAYERS, LENGTH, SEQUENCES, Description, StreamedModel

from nybble import _kernels
from nybble.devices.residency import ResidencyPlan
from nybble.errors import ExecutorError, SettingError
from nybble.runtime.batch import Batch
from nybble.runtime.cpu_executor import CpuExecutor, _config
from nybble.runtime.packed_weights import FreshlyPacked
from nybble.runtime.streaming import ExpertReads, buffer_bytes, largest_expert

MODELS: dict[str, Description] = {
    "mixtral": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}, (4, 32, True, False)),
    "qwen3_moe, permuted": (
        "qwen3_moe",
        {**MIXTURE, "num_experts": 9, "num_experts_per_tok": 3, "norm_topk_prob": True},
        (4, 32, False, True),
    ),
    "qwen2_moe, a shared expert, an MLP between": (
        "qwen2_moe",
        {**MIXTURE, "num_experts": 6, "shared_expert_intermediate_size": 80, "mlp_only_layers": [1]},
        (8, -1, False, True),
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def model(
    request: pytest.FixtureRequest, make_tiny_model: Callable[..., Path], tmp_path_factory: Any
) -> StreamedModel:
    return StreamedModel.made(MODELS[request.param], make_tiny_model, tmp_path_factory.mktemp("experts"))


@pytest.fixture(scope="module")
def mixtral(make_tiny_model: Callable[..., Path], tmp_path_factory: Any) -> StreamedModel:
    return StreamedModel.made(MODELS["mixtral"], make_tiny_model, tmp_path_factory.mktemp("experts"))


PLANS = st.builds(
    lambda layers, head, slots: ResidencyPlan(LAYERS, tuple(sorted(layers)), head, 2, slots),
    st.sets(st.integers(0, LAYERS - 1)),
    st.booleans(),
    st.integers(2, 40),
)
# Steps: for each sequence the tokens it gets. Those of 70 choose all experts.
STEPS = st.lists(
    st.lists(st.sampled_from([0, 1, 1, 3, 17, 70]), min_size=SEQUENCES, max_size=SEQUENCES).filter(any),
    min_size=1,
    max_size=6,
)


@given(residency=PLANS, threads=st.integers(1, 4), steps=STEPS)
@settings(max_examples=40)
def test_any_number_of_slots_gives_the_bits_of_resident_weights(
    model: StreamedModel, residency: ResidencyPlan, threads: int, steps: list[list[int]]
) -> None:
    executor = model.executor(residency, threads)
    past = [0] * SEQUENCES
    for counts in steps:
        chunks = [(s, n) for s, n in enumerate(counts) if n and past[s] + n <= LENGTH]
        if not chunks:
            continue
        batch = model.batch(chunks, past)
        assert np.array_equal(executor.step(batch), model.resident.step(batch))
        assert executor.best_tokens == model.resident.best_tokens
        for s, n in chunks:
            past[s] += n
    executor.close()


def test_an_expert_is_read_when_it_is_chosen_and_once_while_it_stays(model: StreamedModel) -> None:
    source = model.open(ResidencyPlan(LAYERS))
    (mixture,) = (m for m in [model.spec.mixture] if m is not None)
    executor = model.executor(ResidencyPlan(LAYERS, expert_slots=model.experts))
    assert executor.expert_reads == ExpertReads(0, 0, 0)
    most = largest_expert(source) + 2 * 4096
    model.steps(executor, (1,))
    first = executor.expert_reads
    chosen = len(mixture.layers) * mixture.experts_per_token
    assert (first.needed, first.read) == (chosen, chosen)
    assert chosen * (largest_expert(source) - 4096) < first.bytes <= chosen * most
    model.steps(executor, (1, 1))  # the first has the same token in the same place
    second = executor.expert_reads
    assert second.needed == 3 * chosen
    assert second.read <= 2 * chosen
    model.steps(executor, (LENGTH,))  # whatever it chooses
    third = executor.expert_reads
    model.steps(executor)
    assert third.read <= model.experts
    # What was read once stays: there is room for all.
    assert executor.expert_reads.read == third.read
    assert executor.expert_reads.bytes == third.bytes


def test_of_few_slots_those_experts_keep_theirs_that_are_chosen_most(model: StreamedModel) -> None:
    """One token is decoded again and again, and others now and then."""
    mixture = model.spec.mixture
    assert mixture is not None
    slots = 2 * len(mixture.layers) * mixture.experts_per_token
    executor = model.executor(ResidencyPlan(LAYERS, expert_slots=slots), threads=1)
    for _ in range(30):
        model.steps(executor, (1,))
    before = executor.expert_reads
    assert before.read == len(mixture.layers) * mixture.experts_per_token
    for other in range(1, 9):
        executor.step(model.batch([(1, 1)], [0, 0, 0]) if other == 1 else _token(model, other))
        between = executor.expert_reads
        model.steps(executor, (1,))
        assert executor.expert_reads.read == between.read, other


def _token(model: StreamedModel, number: int) -> Batch:
    return model.pages.batch([(1, 0, [model.ids[number]])])


def test_the_experts_of_two_slots_are_read_again_in_every_step(mixtral: StreamedModel) -> None:
    executor = mixtral.executor(ResidencyPlan(LAYERS, expert_slots=2))
    assert np.array_equal(mixtral.steps(executor), mixtral.steps(mixtral.resident))
    reads = executor.expert_reads
    assert reads.needed - reads.read <= 2 * 6


@dataclass
class Faults:
    """A copy of a model's file that is cut off and made whole again."""

    model: StreamedModel
    copy: Path
    content: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.content = self.model.file.read_bytes()
        self.copy.write_bytes(self.content)

    def cut(self, size: int) -> None:
        os.truncate(self.copy, size)

    def mend(self) -> None:
        self.copy.write_bytes(self.content)


@pytest.mark.parametrize("slots", [2, 8])
def test_an_expert_that_cannot_be_read_fails_the_step_and_is_none_that_is_there(
    mixtral: StreamedModel, tmp_path: Path, slots: int
) -> None:
    faults = Faults(mixtral, tmp_path / "packed.bin")
    plan = ResidencyPlan.spread(LAYERS, LAYERS, streamed_head=True, buffers=2, expert_slots=slots)
    executor = mixtral.executor(plan, file=faults.copy)
    expected = mixtral.steps(mixtral.resident)
    assert np.array_equal(mixtral.steps(executor), expected)
    section = mixtral.open(None).file.layer(LAYERS - 1)
    first = section.tensors[mixtral.spec.expert_names(LAYERS - 1)[0]]
    faults.cut(-(-first // 4096) * 4096)
    for _ in range(3):
        with pytest.raises(ExecutorError) as error:
            mixtral.steps(executor)
        assert str(error.value).startswith(f"{faults.copy}: reading expert ")
        assert f" of layer {LAYERS - 1}: only " in str(error.value)
        assert "\n" not in str(error.value)
    faults.mend()
    assert np.array_equal(mixtral.steps(executor), expected)
    assert np.array_equal(mixtral.steps(executor), expected)


@pytest.mark.parametrize("steps_before", [0, 3])
def test_a_forked_child_and_its_parent_both_go_on(mixtral: StreamedModel, steps_before: int) -> None:
    expected = mixtral.steps(mixtral.resident)
    executor = mixtral.executor(ResidencyPlan(LAYERS, (1,), expert_slots=8))
    for _ in range(steps_before):
        mixtral.steps(executor)

    def check() -> bool:
        return all(np.array_equal(mixtral.steps(executor), expected) for _ in range(2))

    assert in_child(check) == 0
    assert in_child(lambda: executor.close() is None) == 0
    assert check()


@pytest.mark.parametrize("count", [0, 1, 2])
def test_it_closes_and_leaves_no_descriptor(mixtral: StreamedModel, count: int) -> None:
    gc.collect()  # what earlier tests left
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        executor = mixtral.executor(ResidencyPlan(LAYERS, expert_slots=4))
        mixtral.steps(executor, (1,) * count) if count else None
        executor.close()
        del executor
    assert len(os.listdir("/proc/self/fd")) == descriptors


def resident_bytes(file: Path) -> int:
    """Of this process's mappings of a file."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name = line.split()[0]
        if not name.endswith(":"):
            inside = line.endswith(str(file))
        elif inside and name == "Rss:":
            found += 1024 * int(line.split()[1])
    return found


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="reads Linux's /proc")
def test_streamed_experts_are_never_resident_in_the_mapping(
    make_tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    path = make_tiny_model(
        "qwen2_moe",
        hidden_size=256,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=256,
        shared_expert_intermediate_size=512,
        num_hidden_layers=LAYERS,
    )
    model = StreamedModel(quantized(load(path), 4, 64, True, True), tmp_path)
    model.resident.close()
    with model.file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def check() -> bool:
        plan = ResidencyPlan(LAYERS, expert_slots=4)
        source = model.open(plan)
        executor = CpuExecutor.from_packed(source, threads=2, residency=plan)
        executor.allocate_kv(model.pages.num_blocks, model.pages.page_size, "f16")
        model.steps(executor)
        before = [
            s.tensors[model.spec.expert_names(layer)[0]] - s.offset
            for layer, s in enumerate(source.file.sections[1:])
        ]
        resident = source.file.ends.size + sum(before)
        # Of each layer the page that its experts begin in, and pages may be larger than what sections fill.
        return resident <= resident_bytes(model.file) <= resident + LAYERS * 8192 + (64 << 10)

    assert in_child(check) == 0


def test_experts_lie_last_in_a_section_each_in_one_piece(model: StreamedModel) -> None:
    source = model.open(None)
    for layer in range(LAYERS):
        section, names = source.file.layer(layer), model.spec.expert_names(layer)
        if not names:
            continue
        places = [section.tensors[name] for name in names]
        assert places == sorted(places)
        others = [
            at for name, at in section.tensors.items() if name.removesuffix(".permutation") not in names
        ]
        assert max(others) < places[0]


@pytest.mark.parametrize("part", range(6))
def test_a_changed_bit_is_found_wherever_it_is(mixtral: StreamedModel, tmp_path: Path, part: int) -> None:
    found = mixtral.open(None).file.layer(1)
    content = bytearray(mixtral.file.read_bytes())
    content[found.offset + 100 + (found.size - 200) * part // 5] ^= 1
    copy = tmp_path / "packed.bin"
    copy.write_bytes(content)
    with pytest.raises(Exception, match="the CRC-32 of section 2 differs"):
        mixtral.open(ResidencyPlan(LAYERS, expert_slots=4), copy)


def test_slots_that_there_cannot_be_are_refused(
    mixtral: StreamedModel, make_tiny_model: Callable[..., Path]
) -> None:
    for slots in (1, -1):
        with pytest.raises(SettingError, match=r"expert_slots is .*; expected at least 2, or 0"):
            ResidencyPlan(LAYERS, expert_slots=slots)
    weights = quantized(load(make_tiny_model("llama", num_hidden_layers=LAYERS)), 4, 64, True, False)
    plan = ResidencyPlan(LAYERS, expert_slots=4)
    with pytest.raises(SettingError, match="the model has no mixture of them"):
        CpuExecutor.from_packed(FreshlyPacked(weights), threads=1, residency=plan)
    source = FreshlyPacked(
        quantized(load(make_tiny_model("mixtral", num_hidden_layers=LAYERS)), 4, 32, True, False)
    )
    with pytest.raises(SettingError, match="file of packed weights"):
        CpuExecutor.from_packed(source, threads=1, residency=plan)


def test_a_stream_that_does_not_match_its_weights_is_refused(mixtral: StreamedModel) -> None:
    """The kernels check nothing again."""
    plan = ResidencyPlan(LAYERS, (1,), expert_slots=4)
    source = mixtral.open(plan)
    executor = CpuExecutor.__new__(CpuExecutor)
    executor._spec = mixtral.spec
    section, names = source.file.layer(1), mixtral.spec.expert_names(1)
    experts = [section.tensors[name] for name in names]
    attention = [section.tensors[linear.name] for linear in mixtral.spec.linears(1)[:4]]
    slot = plan.slot_bytes(largest_expert(source))

    def built(
        of_layers: list[tuple[int, list[int]]], slots: int = 2, size: int = slot, tiles: Any = attention
    ) -> None:
        builder = _kernels.DecoderBuilder(_config(mixtral.spec, mixtral.spec.max_position))
        executor._load(builder, source)
        for layer, places in of_layers:
            builder.stream_experts(layer, places)
        builder.stream_layer(1, section.offset, buffer_bytes(source, plan), tiles)
        file = _kernels.StreamFile(
            source.file.descriptor, "name", 2, buffer_bytes(source, plan), slots, size, 1.0
        )
        _kernels.Decoder(builder, 1, "", file)

    built([(1, experts)])
    for bad in (
        [(LAYERS, experts)],
        [(-1, experts)],
        [(1, experts), (1, experts)],
        [(1, experts), (0, experts)],
        [(1, experts[:-1])],
        [(1, [*experts[:-1], experts[-2]])],
        [(1, [-64, *experts[1:]])],
        [(1, [*experts[:-1], 1 << 62])],
    ):
        with pytest.raises(ValueError, match=r"layer|tiles|slot_bytes"):
            built(bad)
    for changed in ({"slots": 1}, {"slots": 1 << 30}, {"size": slot - 4096 * 3}, {"size": slot + 64}):
        with pytest.raises(ValueError, match=r"expert_slots|slot_bytes"):
            built([(1, experts)], **changed)
    with pytest.raises(ValueError, match="tiles"):
        built([(1, experts)], tiles=[*attention, experts[0]])
    builder = _kernels.DecoderBuilder(_config(mixtral.spec, mixtral.spec.max_position))
    with pytest.raises(ValueError, match="lacks a linear layer"):
        builder.stream_experts(1, experts)
    assert replace(plan, expert_slots=0).slot_bytes(100) == 0
