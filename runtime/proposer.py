"""The contract with what guesses the next tokens of an answer (speculative decoding)."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from .sequence import Request, Sequence


class Proposer(Protocol):
    """Guesses how one answer goes on. What it guesses changes no token, only the time they take: the target
    samples each position, in order, as it would without a draft, and goes on while that gives the draft's
    token. So a draft made with the same random numbers is accepted more often."""

    def propose(self, sequence: "Sequence", limit: int) -> list[int]:
        """At most `limit` tokens that may come next; none where nothing is likely enough. Called between two
        steps, when all tokens of the sequence but the last are in the cache. May be called again for the
        same tokens, after a step that was interrupted."""
        ...

    def observe(self, sequence: "Sequence", proposed: int, accepted: int) -> None:
        """Of a draft of `proposed` tokens, the first `accepted` were right."""
        ...

    def fork(self) -> "Proposer":
        """One for another answer to the same prompt."""
        ...

    def close(self) -> None:
        """The answer has ended."""
        ...


ProposerFor = Callable[["Request"], Proposer | None]
