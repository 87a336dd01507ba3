"""`ResidencyPlan`: which of a model's packed weights stay in memory, and which are read in every step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from ..errors import SettingError

HUGE_PAGE = 2 << 20  # what all buffers together are filled up to from there on
PAGE = 4096  # what sections of the file of packed weights are multiples of, and direct reads of it


@dataclass(frozen=True)
class ResidencyPlan:
    """Where `CpuExecutor` finds each layer's weights. Results are the same bits whatever it says.

    A streamed layer is read from the file of packed weights, ahead of its use, into one of
    `buffers` buffers of the largest streamed layer's size. A streamed head passes through the same buffers in
    pieces, and then the embedding is read by row. Raises `SettingError` for layers that are not there.
    """

    num_layers: int
    streamed_layers: tuple[int, ...] = ()  # ascending
    streamed_head: bool = False
    buffers: int = 3

    def __post_init__(self) -> None:
        expected = sorted({layer for layer in self.streamed_layers if 0 <= layer < self.num_layers})
        if list(self.streamed_layers) != expected:
            raise SettingError(
                f"streamed_layers is {self.streamed_layers}; expected ascending, under {self.num_layers}"
            )
        if self.streams and self.buffers < 2:
            raise SettingError(f"buffers is {self.buffers}; expected at least 2, one read while one is used")

    @classmethod
    def spread(cls, num_layers: int, streamed: int, *, streamed_head: bool = False, buffers: int = 3) -> Self:
        """`streamed` layers at equal distances, so that each is read while resident ones compute."""
        layers = (layer * num_layers // streamed for layer in range(streamed))
        return cls(num_layers, tuple(layers), streamed_head, buffers)

    @property
    def streams(self) -> bool:
        """Whether anything is read while running."""
        return bool(self.streamed_layers) or self.streamed_head

    def buffer_bytes(self, layer_bytes: Sequence[int], head_tile_bytes: int) -> int:
        """Bytes of each buffer, 0 where nothing is streamed: of the largest streamed layer's section, where
        only the head is streamed of the largest layer's; and at least what holds a tile of the head.
        `layer_bytes` are the layers' sections in the file of packed weights, `head_tile_bytes` 16 rows of the
        head."""
        if not self.streams:
            return 0
        largest = max(layer_bytes[layer] for layer in self.streamed_layers or range(self.num_layers))
        tile = -(-(head_tile_bytes + PAGE) // PAGE) * PAGE if self.streamed_head else 0
        return max(largest, tile)

    def stream_buffer_bytes(self, layer_bytes: Sequence[int], head_tile_bytes: int) -> int:
        """Bytes of all buffers, in whole huge pages where they take one."""
        total = self.buffers * self.buffer_bytes(layer_bytes, head_tile_bytes)
        return total if total < HUGE_PAGE else -(-total // HUGE_PAGE) * HUGE_PAGE
