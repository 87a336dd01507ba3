"""`ResidencyPlan`: which of a model's packed weights stay in memory, and which are read while it runs."""

from collections.abc import Sequence
from typing import Self

from ..errors import SettingError
from ..records import dataclass

HUGE_PAGE = 2 << 20  # x86-64's, and AArch64's where pages have 4 KiB
LEAST_SLOTS = 2  # one is read into while another is used
PAGE = 4096  # what sections of the file of packed weights are multiples of, and direct reads of it


@dataclass(frozen=True)
class ResidencyPlan:
    """Where `CpuExecutor` finds each layer's weights. Results are the same bits whatever it says.

    A streamed layer is read from the file of packed weights, ahead of its use, into one of
    `buffers` buffers of the largest streamed layer's size. A streamed head passes through the same buffers in
    pieces, and then the embedding is read by row.

    With `expert_slots` the experts of all mixtures, but for shared ones, are read when a step's tokens have
    chosen them, each into a slot of the largest one's size, and those that are chosen most stay in theirs. Of
    a streamed layer then only the rest is read in every step. Without, experts are where their layer is.

    Raises `SettingError` for layers that are not there.
    """

    num_layers: int
    streamed_layers: tuple[int, ...] = ()  # ascending
    streamed_head: bool = False
    buffers: int = 3
    expert_slots: int = 0

    def __post_init__(self) -> None:
        expected = sorted({layer for layer in self.streamed_layers if 0 <= layer < self.num_layers})
        if list(self.streamed_layers) != expected:
            raise SettingError(
                f"streamed_layers is {self.streamed_layers}; expected ascending, under {self.num_layers}"
            )
        if self.streams and self.buffers < 2:
            raise SettingError(f"buffers is {self.buffers}; expected at least 2, one read while one is used")
        if self.expert_slots and self.expert_slots < LEAST_SLOTS:
            raise SettingError(f"expert_slots is {self.expert_slots}; expected at least {LEAST_SLOTS}, or 0")

    @classmethod
    def spread(
        cls,
        num_layers: int,
        streamed: int,
        *,
        streamed_head: bool = False,
        buffers: int = 3,
        expert_slots: int = 0,
    ) -> Self:
        """`streamed` layers at equal distances, so that each is read while resident ones compute."""
        layers = (layer * num_layers // streamed for layer in range(streamed))
        return cls(num_layers, tuple(layers), streamed_head, buffers, expert_slots)

    @property
    def streams(self) -> bool:
        """Whether anything is read while running."""
        return self.streams_in_order or self.expert_slots > 0

    @property
    def streams_in_order(self) -> bool:
        """Whether anything is read that a step knows before it begins."""
        return bool(self.streamed_layers) or self.streamed_head

    def buffer_bytes(self, layer_bytes: Sequence[int], head_block_bytes: int) -> int:
        """Bytes of each buffer, 0 where nothing passes through them: of the largest streamed layer's section,
        where only the head is streamed of the largest layer's; at least what is read of the head together.
        `layer_bytes` is what is read of each layer's section of the file of packed weights,
        `head_block_bytes` 64 rows of the head."""
        if not self.streams_in_order:
            return 0
        largest = max(layer_bytes[layer] for layer in self.streamed_layers or range(self.num_layers))
        block = -(-(head_block_bytes + PAGE) // PAGE) * PAGE if self.streamed_head else 0
        return max(largest, block)

    def stream_buffer_bytes(self, layer_bytes: Sequence[int], head_block_bytes: int) -> int:
        """Bytes of all buffers, in whole huge pages where they take one."""
        return _in_huge_pages(self.buffers * self.buffer_bytes(layer_bytes, head_block_bytes))

    def slot_bytes(self, expert_bytes: int) -> int:
        """Bytes of each slot for experts whose largest has `expert_bytes` in the file, wherever it begins."""
        return -(-(expert_bytes + PAGE) // PAGE) * PAGE if self.expert_slots else 0

    def expert_slot_bytes(self, expert_bytes: int) -> int:
        """Bytes of all slots, as of all buffers."""
        return _in_huge_pages(self.expert_slots * self.slot_bytes(expert_bytes))


def _in_huge_pages(size: int) -> int:
    return size if size < HUGE_PAGE else -(-size // HUGE_PAGE) * HUGE_PAGE
