"""The ways to leave weights out of memory, in the order that they are taken."""

from collections.abc import Iterator

from .residency import ResidencyPlan

# One buffer is read into while the other is used: a third hides an uneven disk.
BUFFERS, LEAST_BUFFERS = 3, 2


def residencies(num_layers: int) -> Iterator[ResidencyPlan]:
    """As few layers as need be, at equal distances; then the head; then with a buffer less."""
    for streamed in range(1, num_layers + 1):
        yield ResidencyPlan.spread(num_layers, streamed, buffers=BUFFERS)
    yield ResidencyPlan.spread(num_layers, num_layers, streamed_head=True, buffers=BUFFERS)
    yield least_residency(num_layers)


def least_residency(num_layers: int) -> ResidencyPlan:
    """Nothing in memory that can be streamed."""
    return ResidencyPlan.spread(num_layers, num_layers, streamed_head=True, buffers=LEAST_BUFFERS)
