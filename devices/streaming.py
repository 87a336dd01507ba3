"""The ways to leave weights out of memory, in the order that they are taken."""

from collections.abc import Iterator

from .memory_plan import RunSettings
from .packed_sizes import packed_bytes
from .residency import ResidencyPlan

# One buffer is read into while another is used: a third hides an uneven disk, and a fourth keeps it busy
# where layers are small. Of SmolLM2, whose layers take 2 MB, as much memory holds one layer less with four of
# them, and a step took 2 to 6 % less time; with six, which leave three less, 15 % more.
BUFFERS, MOST_BUFFERS, LEAST_BUFFERS = 3, 4, 2
MOST_BYTES = 8 << 20  # of four buffers


def buffers_of(layer_bytes: int) -> int:
    """How many buffers layers of so many bytes are read through, where memory is not at its least."""
    return MOST_BUFFERS if MOST_BUFFERS * layer_bytes <= MOST_BYTES else BUFFERS


def residencies(run: RunSettings) -> Iterator[ResidencyPlan]:
    """As few layers as need be, at equal distances; then the head; then with two buffers. Raises
    `SettingError` for an unquantized model."""
    num_layers = run.spec.num_layers
    sizes = packed_bytes(run.spec, run.recipe, run.linear_bytes)
    buffers = buffers_of(max(layer.section for layer in sizes.layers))
    for streamed in range(1, num_layers + 1):
        yield ResidencyPlan.spread(num_layers, streamed, buffers=buffers)
    yield ResidencyPlan.spread(num_layers, num_layers, streamed_head=True, buffers=buffers)
    yield least_residency(num_layers)


def least_residency(num_layers: int) -> ResidencyPlan:
    """Nothing in memory that can be streamed."""
    return ResidencyPlan.spread(num_layers, num_layers, streamed_head=True, buffers=LEAST_BUFFERS)
