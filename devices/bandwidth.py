"""What reading the same bytes again and again takes, as every step reads a model's weights."""

from ..records import dataclass


@dataclass(frozen=True)
class ReadRate:
    """Measured: a buffer of `bytes`, read over and over at `rate` bytes per second."""

    bytes: int
    rate: float

    @property
    def seconds(self) -> float:
        return self.bytes / self.rate


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second from memory; `cached` of what is read again and again come from the last cache, and
    take no time."""

    memory: float
    cached: float = 0.0

    @classmethod
    def between(cls, small: ReadRate, large: ReadRate) -> "Bandwidth":
        """The line through two measurements; of one size, or where `small` is no faster, what `large` is."""
        if small.bytes >= large.bytes or small.rate <= large.rate:
            return cls(large.rate)
        memory = (large.bytes - small.bytes) / (large.seconds - small.seconds)
        return cls(memory, max(0.0, small.bytes - small.seconds * memory))

    def at(self, size: float) -> float:
        """Bytes per second of reading so many bytes. Little ones, which caches may hold altogether, are no
        more than twice as fast."""
        return self.memory / (1 - min(self.cached / size, 0.5)) if size else self.memory
