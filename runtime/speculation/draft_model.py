"""`DraftModelProposer`: a smaller model guesses what a larger one will say (https://arxiv.org/abs/2211.17192)."""

import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ...kvcache import KvCache, OutOfPagesError, SequenceBlocks, block_table
from ..batch import Batch
from ..executor import Executor
from ..page_copies import PageCopies
from .acceptance import Acceptance
from .proposer import Answer

# What is believed of a draft model before it was seen to be right or wrong.
BELIEF = 0.7
# Below this chance of the next token, an answer's texts are not computed for the sake of guessing.
HOPELESS = 0.3
_FORGET = 0.2


class _State:
    def __init__(self, tokens: list[int], blocks: SequenceBlocks, belief: float) -> None:
        self.tokens = tokens  # the answer's list
        self.blocks = blocks
        self.computed = 0  # how many of the tokens are in the draft's cache
        self.guessed: list[int] = []  # what is in the cache behind them
        self.acceptance = Acceptance((belief,))


class DraftModelProposer:
    """Guesses by another model with the same tokens, on an executor with a cache of its own. It chooses as
    the target does, with the request's settings and random numbers, so that sampled answers agree as often
    as greedy ones. All answers' guesses are made together; what an answer said meanwhile is computed first.

    `max_tokens` is the most that is computed in one of its steps, `vocab_size` the target's.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        vocab_size: int,
        max_tokens: int = 256,
        max_position: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._executor = executor
        self._vocab_size = vocab_size
        self._max_tokens = max_tokens
        self._max_position = max_position or executor.spec.max_position
        self._clock = clock
        layout = executor.kv_layout
        # What answers to the same prompt have in common is computed once.
        self.cache = KvCache(layout.num_blocks, layout.page_size, executor.spec.window_groups or (None,))
        self._copies = PageCopies(executor, self.cache)
        self._states: dict[Answer, _State] = {}
        self._overall = Acceptance((BELIEF,))
        self._round = 0.0  # seconds of a step of the draft
        self._closed = False

    def chances(self, answer: Answer, limit: int) -> Sequence[float]:
        if self._closed:
            return ()
        state = self._catch_up(answer)
        share = state.acceptance.share(0)
        if len(answer.tokens) - state.computed > self._max_tokens and share < HOPELESS:
            return ()
        limit = min(limit, self._max_position - len(answer.tokens))
        return [share**length for length in range(1, limit + 1)]

    def draft(self, answers: Sequence[Answer], counts: Sequence[int]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in answers]
        active = [place for place, count in enumerate(counts) if count]
        started, rounds = self._clock(), 0
        try:
            left = self._max_tokens
            ready = []
            behind: list[tuple[_State, list[int]]] = []
            for place in active:
                state = self._states[answers[place]]
                tokens = state.tokens[state.computed : state.computed + left]
                if tokens and self._reserve(state, len(tokens) + counts[place]):
                    left -= len(tokens)
                    behind.append((state, tokens))
                    if state.computed + len(tokens) == len(state.tokens):
                        ready.append(place)
            if not behind:
                return drafts
            rows = self._run(behind, [self._states[answers[place]] for place in ready])
            while ready:
                rounds += 1
                following = []
                for place, row in zip(ready, rows, strict=True):
                    if self._guess(answers[place], drafts[place], row) and len(drafts[place]) < counts[place]:
                        following.append(place)
                ready = following
                if ready:
                    states = [self._states[answers[place]] for place in ready]
                    rows = self._run(
                        [(s, [drafts[p][-1]]) for s, p in zip(states, ready, strict=True)], states
                    )
        finally:
            for place in active:
                chooser = answers[place].chooser
                if chooser is not None:
                    chooser.take_back(drafts[place])
        if rounds:
            seconds = (self._clock() - started) / rounds
            self._round += _FORGET * (seconds - self._round) if self._round else seconds
        return drafts

    def observe(self, answer: Answer, proposed: int, accepted: int) -> None:
        state = self._states.get(answer)
        if state is None:  # the draft's executor failed since
            return
        for acceptance in (state.acceptance, self._overall):
            for _ in range(accepted):
                acceptance.observe(0, True)
            if accepted < proposed:
                acceptance.observe(0, False)

    def seconds(self, length: int) -> float:
        return self._round * length

    def forget(self, answer: Answer) -> None:
        state = self._states.pop(answer, None)
        if state is not None:
            state.blocks.release()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            for answer in list(self._states):
                self.forget(answer)
            self._executor.close()

    def _catch_up(self, answer: Answer) -> _State:
        """The answer's state, in which what was guessed right since then counts as computed."""
        state = self._states.get(answer)
        if state is None:
            belief = self._overall.share(0)
            state = self._states[answer] = _State(answer.tokens, self.cache.sequence(), belief)
            state.computed = self.cache.adopt(state.blocks, state.tokens)
        elif state.tokens is not answer.tokens:  # the text goes on from another beginning
            state.blocks.release()
            state.tokens, state.guessed = answer.tokens, []
            state.computed = self.cache.adopt(state.blocks, state.tokens)
        for token in state.guessed:
            # The last token has to run, so that its logits are there.
            if state.computed >= len(state.tokens) - 1 or state.tokens[state.computed] != token:
                break
            state.computed += 1
        state.guessed = []
        return state

    def _guess(self, answer: Answer, draft: list[int], row: NDArray[np.float32]) -> bool:
        """Adds the next token to the draft; whether another can follow."""
        chooser = answer.chooser
        assert chooser is not None
        token = chooser.choose(row, answer.position + len(draft))
        chooser.accept(token)
        draft.append(token)
        return not (chooser.stops(token) or chooser.ended)

    def _reserve(self, state: _State, count: int) -> bool:
        try:
            state.blocks.append(max(0, state.computed + count - state.blocks.num_tokens))
        except OutOfPagesError:
            return False
        return True

    def _run(
        self, chunks: Sequence[tuple[_State, list[int]]], wanted: Sequence[_State]
    ) -> Sequence[NDArray[np.float32]]:
        """Runs tokens of texts, behind what is computed of each; the logits behind the `wanted` ones' last,
        [vocab] each."""
        ids: list[int] = []
        begins, past, rows = [0], [], []
        slots: list[list[int]] = [[] for _ in range(self.cache.num_groups)]
        for state, tokens in chunks:
            begin = state.computed + len(state.guessed)
            for of_group, more in zip(slots, state.blocks.slots(begin, len(tokens)), strict=True):
                of_group += more
            ids += tokens
            past.append(begin)
            begins.append(len(ids))
            if any(state is other for other in wanted):
                rows.append(len(ids) - 1)
        self._copies.make()
        logits = self._executor.step(
            Batch(
                token_ids=np.array(ids, np.int32),
                cu_seqlens=np.array(begins, np.int32),
                past_lens=np.array(past, np.int32),
                block_table=block_table([state.blocks for state, _ in chunks]),
                slot_mapping=np.array(slots, np.int32),
                logit_rows=np.array(rows, np.int32),
            )
        )
        for state, tokens in chunks:
            text = len(state.tokens) - state.computed
            state.computed += min(text, len(tokens))
            state.guessed += tokens[text:]
            self.cache.insert(state.blocks, state.tokens, state.computed)
        return [self._fit(row) for row in logits]

    def _fit(self, row: NDArray[np.float32]) -> NDArray[np.float32]:
        """A row as wide as the target's: models may have logits for more tokens than there are."""
        if len(row) >= self._vocab_size:
            return row[: self._vocab_size]
        return np.concatenate([row, np.full(self._vocab_size - len(row), -np.inf, np.float32)])
