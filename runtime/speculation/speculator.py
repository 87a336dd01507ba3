"""`Speculator`: how much is guessed, for whom, in a step."""

import logging
import time
from collections.abc import Callable, Sequence

from .proposer import Answer, Proposer
from .step_costs import StepCosts

log = logging.getLogger("nybble")

# Tokens of a guess, and of all guesses of a step.
MAX_DRAFT, MAX_DRAFTS = 15, 48
# The part by which guesses must make the tokens come sooner, so that what was measured badly does no harm.
GAIN = 1.03
# After so many steps without a guess it is looked for in every fourth step only: looking takes time too.
QUIET_AFTER, LOOK_EVERY = 32, 4
# After so many one is made that would pay if it cost less and was right more often.
PROBE_AFTER = 96


class Speculator:
    """Chooses, in each step, the guesses that make most tokens a second: from the chances that the proposer
    sees and what steps with more tokens were measured to take. Where none pays, nothing is guessed. A failure
    of the proposer, such as of a draft's executor, ends the guessing, with a line in the log, and no
    request."""

    def __init__(
        self,
        proposer: Proposer,
        *,
        max_rows: int = MAX_DRAFTS,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`max_rows` bounds the guessed tokens of a step, each of which takes a row of logits."""
        self._proposer = proposer
        self._max_rows = min(max_rows, MAX_DRAFTS)
        self._clock = clock
        self._costs: dict[int, StepCosts] = {}
        self._spent = 0.0  # seconds of this step's guessing
        self._waited = 0  # steps without a guess
        self.failure: Exception | None = None  # what ended the guessing

    def propose(self, answers: Sequence[Answer], limits: Sequence[int], room: int) -> Sequence[Sequence[int]]:
        """What may come next in each of the answers, all tokens of which but the last are in the cache: at
        most `limits` tokens, and `room` for all. Asked once in a step, for all that go on in it."""
        if self.failure is not None or (self._waited > QUIET_AFTER and self._waited % LOOK_EVERY):
            self._waited, self._spent = self._waited + 1, 0.0
            return [()] * len(answers)
        started = self._clock()
        drafts: Sequence[Sequence[int]] = [()] * len(answers)
        try:
            chances = [
                self._proposer.chances(answer, min(limit, MAX_DRAFT)) if limit > 0 else ()
                for answer, limit in zip(answers, limits, strict=True)
            ]
            self._waited += 1
            if any(chances):
                counts = self._choose(chances, min(room, self._max_rows))
                if any(counts):
                    self._waited = 0
                    drafts = self._draft(answers, counts)
        except Exception as error:
            # Guesses are never needed.
            log.warning("speculation failed, and is off from now on: %s", error)
            self.failure = error
            self._proposer.close()
        self._spent = self._clock() - started
        return drafts

    def _draft(self, answers: Sequence[Answer], counts: Sequence[int]) -> list[list[int]]:
        drafts = self._proposer.draft(answers, counts)
        for place, (answer, draft) in enumerate(zip(answers, drafts, strict=True)):
            # What the answer's grammar forbids need not be checked.
            if draft and answer.chooser is not None:
                drafts[place] = draft[: answer.chooser.count_allowed(draft)]
        return drafts

    def observe(self, answer: Answer, proposed: int, accepted: int) -> None:
        """The first `accepted` of the answer's `proposed` tokens were right."""
        self._proposer.observe(answer, proposed, accepted)

    @property
    def rest(self) -> int:
        """Steps, one at least, until the next look for a guess, where the last one found none."""
        if self._waited <= QUIET_AFTER:
            return 1
        return LOOK_EVERY - (self._waited - 1) % LOOK_EVERY

    def observe_step(self, answers: int, more: int, seconds: float, steps: int = 1) -> None:
        """A step in which nothing but so many answers went on, with so many tokens more than one of each,
        took that long, guessing included; or each of several that `propose` was asked before once."""
        self._waited += steps - 1
        self._costs_of(answers).observe(more, max(0.0, seconds - self._spent / steps))

    def forget(self, answer: Answer) -> None:
        """The answer has ended."""
        self._proposer.forget(answer)

    def close(self) -> None:
        self._proposer.close()

    def _choose(self, chances: Sequence[Sequence[float]], room: int) -> list[int]:
        """How long each answer's guess is to be."""
        costs = self._costs_of(len(chances))
        if costs.wants_plain:
            return [0] * len(chances)
        # A token is worth its chance. Those of an answer fall, so the best so many of all are first ones.
        offers = sorted(
            ((chance, place) for place, falling in enumerate(chances) for chance in falling), reverse=True
        )[:room]
        ratios, plain = costs.ratios(len(offers)), costs.plain
        probing = self._waited >= PROBE_AFTER
        value = float(len(chances))  # tokens of the step, on average
        counts = [0] * len(chances)
        best, best_rate, longest = 0, value * (1.0 if probing else GAIN), 0
        for taken, (chance, place) in enumerate(offers, start=1):
            value += max(chance, 0.5) if probing else chance
            counts[place] += 1
            longest = max(longest, counts[place])
            drafting = self._proposer.seconds(longest) / plain
            cost = ratios[taken] + drafting
            rate = value / (0.5 * (1 + cost) if probing else cost)
            if rate > best_rate:
                best, best_rate = taken, rate
        counts = [0] * len(chances)
        for _, place in offers[: min(best, len(chances)) if probing else best]:
            counts[place] += 1
        return counts

    def _costs_of(self, answers: int) -> StepCosts:
        costs = self._costs.get(answers)
        if costs is None:
            costs = self._costs[answers] = StepCosts(answers)
        return costs
