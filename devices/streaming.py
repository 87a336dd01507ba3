"""The ways to leave weights out of memory, in the order that they are taken."""

from collections.abc import Iterator
from dataclasses import replace

from ..models.spec import ModelSpec
from .memory_plan import RunSettings
from .packed_sizes import packed_bytes
from .residency import LEAST_SLOTS, ResidencyPlan

# One buffer is read into while another is used: a third hides an uneven disk, and a fourth keeps it busy
# where layers are small. Of SmolLM2, whose layers take 2 MB, as much memory holds one layer less with four of
# them, and a step took 2 to 6 % less time; with six, which leave three less, 15 % more.
BUFFERS, MOST_BUFFERS, LEAST_BUFFERS = 3, 4, 2
MOST_BYTES = 8 << 20  # of four buffers
SLOT_STEPS = 64  # so many plans there are between all experts in memory and none


def buffers_of(layer_bytes: int) -> int:
    """How many buffers layers of so many bytes are read through, where memory is not at its least."""
    return MOST_BUFFERS if MOST_BUFFERS * layer_bytes <= MOST_BYTES else BUFFERS


def residencies(run: RunSettings) -> Iterator[ResidencyPlan]:
    """Of mixtures as few experts out of memory as need be, down to as many slots as a token has experts: what
    every token goes through is worth more. Then as few layers as need be, at equal distances; then the head;
    then with two buffers and two slots. Raises `SettingError` for an unquantized model."""
    num_layers = run.spec.num_layers
    sizes = packed_bytes(run.spec, run.recipe, run.linear_bytes)
    slots = 0
    if (mixture := run.spec.mixture) is not None:
        experts, slots = total_experts(run.spec), max(LEAST_SLOTS, mixture.experts_per_token)
        for part in range(SLOT_STEPS - 1, 0, -1):
            if (some := experts * part // SLOT_STEPS) > slots:
                yield ResidencyPlan(num_layers, expert_slots=some)
        yield ResidencyPlan(num_layers, expert_slots=slots)
    buffers = buffers_of(max(layer.read(slots > 0) for layer in sizes.layers))
    for streamed in range(1, num_layers + 1):
        yield ResidencyPlan.spread(num_layers, streamed, buffers=buffers, expert_slots=slots)
    least = least_residency(run.spec)
    yield replace(least, buffers=buffers, expert_slots=slots)
    yield least


def least_residency(spec: ModelSpec) -> ResidencyPlan:
    """Nothing in memory that can be streamed."""
    slots = LEAST_SLOTS if spec.mixture is not None else 0
    return ResidencyPlan.spread(
        spec.num_layers, spec.num_layers, streamed_head=True, buffers=LEAST_BUFFERS, expert_slots=slots
    )


def total_experts(spec: ModelSpec) -> int:
    """Of all layers, those of which tokens choose some."""
    return 0 if spec.mixture is None else len(spec.mixture.layers) * spec.mixture.num_experts
