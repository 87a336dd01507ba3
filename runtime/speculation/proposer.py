"""The contract with what guesses how answers go on."""

from collections.abc import Sequence
from typing import Protocol

from ..token_chooser import TokenChooser


class Answer(Protocol):
    """An answer being made, as proposers see it."""

    tokens: list[int]  # prompt and answer, as the model sees them; grows, or is replaced by another list
    chooser: TokenChooser | None

    @property
    def position(self) -> int:
        """Where the next token is in the text: with the request's seed, the key of its random number."""
        ...


class Proposer(Protocol):
    """Guesses the next tokens of answers. A guess changes no token, only the time they take: the target
    chooses every token itself, from its own logits and random numbers, and goes on while that gives the
    guess.

    Keeps what it knows of an answer from its first look at it until `forget`.
    """

    def chances(self, answer: Answer, limit: int) -> Sequence[float]:
        """For each length up to `limit`, the probability that a guess of that many tokens is right
        altogether: [n], falling. Empty where it has no guess."""
        ...

    def draft(self, answers: Sequence[Answer], counts: Sequence[int]) -> list[list[int]]:
        """Guesses of at most so many tokens, for answers whose chances were just asked for; for as long as
        the target's cache holds all their tokens but the last."""
        ...

    def observe(self, answer: Answer, proposed: int, accepted: int) -> None:
        """The first `accepted` of `proposed` tokens were right."""
        ...

    def seconds(self, length: int) -> float:
        """About how long it takes to guess `length` tokens for all answers together."""
        ...

    def forget(self, answer: Answer) -> None:
        """The answer has ended."""
        ...

    def close(self) -> None:
        """Frees what it holds. May be called again."""
        ...
