"""`NgramProposer`: prompt lookup. An answer goes on as its prompt, or it itself, did after the same words
(https://github.com/apoorvumang/prompt-lookup-decoding)."""

from bisect import bisect_right
from collections.abc import Sequence

from .acceptance import Acceptance
from .ngram_index import NgramIndex
from .proposer import Answer

# Guesses are as good as the match is long: of each range of lengths, where it begins, and the share that is
# believed to be right before any was seen.
LENGTHS = (2, 3, 4, 6, 10, 18)
BELIEFS = (0.2, 0.3, 0.5, 0.65, 0.8, 0.9)
KIND = tuple(max(0, bisect_right(LENGTHS, length) - 1) for length in range(64))
# Tokens of a prompt that are indexed in a step: a fraction of a millisecond.
INDEXED_AT_ONCE = 256
# Chances below this are not worth a look.
UNLIKELY = 0.05


class _State:
    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens  # the answer's list
        self.index = NgramIndex()
        self.acceptance = Acceptance(BELIEFS)


class NgramProposer:
    """Looks up where an answer's last tokens were before, in its prompt and in itself. What it would have
    guessed is compared with each token that comes, whether it was asked or not: what it knows of its chances
    costs no wrong guess."""

    def __init__(self) -> None:
        self._states: dict[Answer, _State] = {}

    def chances(self, answer: Answer, limit: int) -> Sequence[float]:
        state = self._states.get(answer)
        if state is None or state.tokens is not answer.tokens:
            state = self._states[answer] = _State(answer.tokens)
        if not self._catch_up(state) or state.index.place == 0:
            return ()
        chance, found = 1.0, []
        share, length = state.acceptance.share, state.index.length
        for further in range(limit):
            # After each right guess the match is longer.
            chance *= share(KIND[min(length + further, 63)])
            if chance < UNLIKELY:
                break
            found.append(chance)
        return found

    def draft(self, answers: Sequence[Answer], counts: Sequence[int]) -> list[list[int]]:
        return [
            self._states[answer].index.follow(count) if count else []
            for answer, count in zip(answers, counts, strict=True)
        ]

    def observe(self, answer: Answer, proposed: int, accepted: int) -> None:
        pass  # seen when the tokens come

    def seconds(self, length: int) -> float:
        return 0.0

    def forget(self, answer: Answer) -> None:
        self._states.pop(answer, None)

    def close(self) -> None:
        self._states.clear()

    def _catch_up(self, state: _State) -> bool:
        """Whether all the answer's tokens are in its index now."""
        index, tokens = state.index, state.tokens
        there = len(index.tokens)
        missing = len(tokens) - there
        if missing > 16:
            count = min(missing, INDEXED_AT_ONCE)
            index.extend(tokens[there : there + count])
            return count == missing
        for token in tokens[there:]:
            kind = KIND[min(index.length, 63)]
            right = index.push(token)
            if right is not None:
                state.acceptance.observe(kind, right)
        return True
