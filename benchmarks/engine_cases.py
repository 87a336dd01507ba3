"""What `benchmarks/engine.py` asks of a runtime, and the figures it takes from the answers' times."""

import random
import statistics
from itertools import pairwise
from pydoc_data.topics import topics
from typing import Any

from peers import Contender

from nybble.runtime.tokenizer import Tokenizer

# Of all runtimes: sequences at once, and tokens of each.
SEQUENCES, CONTEXT = 16, 4224
# Arrivals a second, more than any of them keeps up with on two cores.
REQUESTS, RATE = 32, 8.0
PROMPTS, ANSWERS = (50, 800), (32, 256)
SYSTEM, QUESTION, CHATS, REPLY = 1024, 16, 16, 32
STREAMS, STREAM_PROMPT, LONG = 8, 64, 4000
UNDISTURBED = 300  # tokens of each stream while nothing else comes
ENDLESS = 3000  # more than a stream says until the long prompt has its first token

Request = tuple[float, list[int], int]  # when it comes, its prompt, tokens of its answer


class Prose:
    """Token ids of English prose, Python's own language reference."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._ids = tokenizer.encode("\n".join(topics[name] for name in sorted(topics)))

    def cut(self, numbers: random.Random, tokens: int) -> list[int]:
        """From anywhere in it, so that no two beginnings are alike."""
        start = numbers.randrange(len(self._ids) - tokens)
        return self._ids[start : start + tokens]


def ask(contender: Contender, requests: list[Request], until: int | None = None) -> list[list[float]]:
    """When each token of each answer was there, in seconds."""
    assert contender.worker is not None
    times: list[list[float]] = contender.worker.ask("traffic", arrivals=requests, until=until)["times"]
    return times


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def between(times: list[list[float]], since: float = 0.0) -> dict[str, float]:
    """Milliseconds between two tokens of an answer, of those that came after `since`."""
    found = [later - sooner for each in times for sooner, later in pairwise(each) if later > since]
    return {f"p{share}": 1e3 * quantile(found, share / 100) for share in (50, 99)}


def record(contender: Contender, case: str, values: dict[str, float]) -> None:
    for name, value in values.items():
        contender.record(f"{case}: {name}", value)


def warm_up(contender: Contender, prose: Prose) -> None:
    """Streams, and prompts that come beside them, of the lengths that are measured."""
    numbers = random.Random("warm")
    streams = [(0.0, prose.cut(numbers, 64), 48) for _ in range(4)]
    ask(contender, [*streams, *((0.2, prose.cut(numbers, n), 4) for n in (64, 300, 600))])


def arrivals(contender: Contender, prose: Prose, number: int) -> None:
    """Requests at random times."""
    numbers, at = random.Random(f"arrivals {number}"), 0.0
    requests: list[Request] = []
    for _ in range(REQUESTS):
        at += numbers.expovariate(RATE)
        requests.append((at, prose.cut(numbers, numbers.randint(*PROMPTS)), numbers.randint(*ANSWERS)))
    before = counted(contender) if is_ours(contender) else {}
    times = ask(contender, requests)
    seconds = max(each[-1] for each in times) - requests[0][0]
    tokens = sum(len(prompt) + new for _, prompt, new in requests)
    firsts = [each[0] - at for each, (at, _, _) in zip(times, requests, strict=True)]
    found = between(times)
    record(
        contender,
        "arrivals",
        {
            "tokens/s": tokens / seconds,
            "answers' tokens/s": sum(new for _, _, new in requests) / seconds,
            "between tokens, p50": found["p50"],
            "between tokens, p99": found["p99"],
            "first token, p50": 1e3 * quantile(firsts, 0.5),
            "first token, p99": 1e3 * quantile(firsts, 0.99),
        },
    )
    if before:
        after = counted(contender)
        spent = {name: after[name] - before[name] for name in after}
        record(
            contender,
            "arrivals, engine",
            {
                "steps": spent["steps"],
                "sequences a step": spent["sequences"] / spent["steps"],
                "share of time in steps": spent["busy_seconds"] / seconds,
                "share of steps outside the executor": 1 - spent["executor_seconds"] / spent["busy_seconds"],
                "guessed tokens that were right": spent["accepted_tokens"] / max(1, spent["draft_tokens"]),
            },
        )


def shared_prefix(contender: Contender, prose: Prose, number: int) -> None:
    """A system prompt's first chat, the others after each other, and all of another one's at once."""
    numbers = random.Random(f"prefix {number}")

    def chats(system: list[int]) -> list[Request]:
        return [(0.0, system + prose.cut(numbers, QUESTION), REPLY) for _ in range(CHATS)]

    firsts = [ask(contender, [chat])[0][0] for chat in chats(prose.cut(numbers, SYSTEM))]
    record(
        contender,
        "prefix",
        {"first token, cold": 1e3 * firsts[0], "first token, hit": 1e3 * statistics.median(firsts[1:])},
    )
    if not is_ours(contender):
        return
    together = chats(prose.cut(numbers, SYSTEM))
    assert contender.worker is not None
    alone = contender.worker.ask("peak_pages", arrivals=chats(prose.cut(numbers, SYSTEM))[:1])["pages"]
    before = counted(contender)
    pages = contender.worker.ask("peak_pages", arrivals=together)["pages"]
    spent = {name: value - before[name] for name, value in counted(contender).items()}
    asked = sum(len(prompt) for _, prompt, _ in together)
    record(
        contender,
        "prefix",
        {
            "pages": pages,
            "pages, unshared": CHATS * alone,
            "hit tokens": spent["hit_tokens"],
            "tokens not computed": asked - spent["prefill_tokens"],
        },
    )


def long_prompt(contender: Contender, prose: Prose, number: int) -> None:
    """Streams by themselves, a long prompt by itself, and one that comes while others stream."""
    numbers = random.Random(f"long {number}")
    times = ask(contender, streams(prose, numbers, UNDISTURBED))
    quiet = between(times, since=max(each[0] for each in times))
    alone = ask(contender, [(0.0, prose.cut(numbers, LONG), 1)], until=0)[0][0]
    record(
        contender,
        "long",
        {
            "between tokens, p50, undisturbed": quiet["p50"],
            "between tokens, p99, undisturbed": quiet["p99"],
            "first token, alone": 1e3 * alone,
        },
    )
    disturb(contender, prose, numbers, "long")


def with_target(contender: Contender, prose: Prose, number: int, threads: int, undisturbed_ms: float) -> None:
    """The same in an engine whose target is twice the undisturbed time."""
    assert contender.worker is not None
    contender.options = contender.options | {"target_token_ms": 2 * undisturbed_ms}
    contender.worker.load(contender, threads, CONTEXT, SEQUENCES)
    warm_up(contender, prose)
    disturb(contender, prose, random.Random(f"target {number}"), "long, with a target")


def streams(prose: Prose, numbers: random.Random, tokens: int) -> list[Request]:
    return [(0.0, prose.cut(numbers, STREAM_PROMPT), tokens) for _ in range(STREAMS)]


def disturb(contender: Contender, prose: Prose, numbers: random.Random, case: str) -> None:
    came = 1.0  # seconds; all streams have begun
    requests = [*streams(prose, numbers, ENDLESS), (came, prose.cut(numbers, LONG), 1)]
    times = ask(contender, requests, until=STREAMS)
    found = between(times[:STREAMS], since=came)
    record(
        contender,
        case,
        {
            "between tokens, p50": found["p50"],
            "between tokens, p99": found["p99"],
            "first token": 1e3 * (times[STREAMS][0] - came),
        },
    )


def is_ours(contender: Contender) -> bool:
    return contender.script == "nybble_engine.py"


def counted(contender: Contender) -> dict[str, float]:
    """What our engine has counted since it was made."""
    assert contender.worker is not None
    found: dict[str, Any] = contender.worker.ask("statistics")
    names = ("steps", "prefill_tokens", "draft_tokens", "accepted_tokens", "busy_seconds", "executor_seconds")
    counts: dict[str, float] = {name: found[name] for name in names}
    counts["sequences"] = found["mean_batch"] * found["steps"]
    counts["hit_tokens"] = found["prefix"]["hit_tokens"]
    return counts
