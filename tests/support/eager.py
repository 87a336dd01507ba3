"""`Eager`: a speculator that does not ask what pays."""

from collections.abc import Sequence

from nybble.runtime.speculation import Speculator


class Eager(Speculator):
    """Guesses as much as there are chances for, whatever it takes: what pays depends on the machine."""

    def _choose(self, chances: Sequence[Sequence[float]], room: int) -> list[int]:
        counts = []
        for each in chances:
            counts.append(min(len(each), room))
            room -= counts[-1]
        return counts
