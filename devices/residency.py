"""`ResidencyPlan`: which of a model's packed weights stay in memory, and which are read in every step."""

from dataclasses import dataclass
from typing import Self

from ..errors import SettingError


@dataclass(frozen=True)
class ResidencyPlan:
    """Where `CpuExecutor` finds each layer's weights. Results are the same bits whatever it says.

    A streamed layer is read from the file of packed weights by a reader thread, ahead of its use, into one of
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
