"""How fast a planned run will be, from the roofline: bytes that have to be read over the bandwidth,
operations over the integer rate, whichever takes longer, and for streamed weights what the disk gives."""

from dataclasses import dataclass

from ..models.spec import ModelSpec
from .memory_plan import MemoryPlan, RunSettings
from .model_bytes import linears
from .packed_sizes import packed_bytes
from .profile import DeviceProfile

# Shares of the limits that the kernels reach, and what they do besides, in seconds.
WEIGHT_READING, KV_READING = 0.9, 0.5
DECODE_ARITHMETIC, PREFILL_ARITHMETIC, ATTENTION_ARITHMETIC = 0.5, 0.8, 0.1
STEP, LAYER, TOKEN_ELEMENT = 100e-6, 20e-6, 1e-9


@dataclass(frozen=True)
class Rates:
    """What a machine can do at most: bytes per second from memory, operations per second of the int8 dot
    product, bytes per second from disk; None where it is not known."""

    bandwidth: float
    integer_rate: float
    disk_bandwidth: float | None = None

    @classmethod
    def of(cls, profile: DeviceProfile) -> "Rates | None":
        """A profile's, None where it does not say."""
        if profile.bandwidth is None or profile.integer_rate is None:
            return None
        return cls(profile.bandwidth, profile.integer_rate, profile.disk_bandwidth)


@dataclass(frozen=True)
class Speeds:
    """Predicted for `length` tokens of prompt, which answers go on after."""

    length: int
    prefill: float  # tokens per second of a prompt
    first_token: float  # seconds from a prompt to its answer's first token
    decode: float  # tokens per second of one answer
    decode_all: float  # tokens per second of all sequences' answers together


def predict(run: RunSettings, plan: MemoryPlan, rates: Rates | None, length: int = 512) -> Speeds | None:
    """Speeds of `plan`, which is `run`'s, at `length` tokens or the context where that is shorter. None
    without rates, or without the disk's where weights are streamed."""
    if rates is None or (plan.residency.streams and rates.disk_bandwidth is None):
        return None
    roofline = Roofline(run, plan, rates)
    length = max(1, min(length, plan.context - 1))
    prompt = roofline.prompt(length)
    one, all_of_them = roofline.decode(length, 1), roofline.decode(length, plan.sequences)
    return Speeds(length, length / prompt, prompt, 1 / one, plan.sequences / all_of_them)


class Roofline:
    """Seconds of a plan's steps."""

    def __init__(self, run: RunSettings, plan: MemoryPlan, rates: Rates) -> None:
        spec, sizes = run.spec, packed_bytes(run.spec, run.recipe, run.linear_bytes)
        self._spec, self._plan, self._rates = spec, plan, rates
        self._weights = sum(layer.linears for layer in sizes.layers)
        self._head = sizes.embedding
        streamed = sum(sizes.layers[layer].section for layer in plan.residency.streamed_layers)
        self._streamed = streamed + (self._head if plan.residency.streamed_head else 0)
        self._elements = sum(linear.out_features * linear.in_features for linear in linears(spec))

    def decode(self, length: int, sequences: int) -> float:
        """A step of one new token for each of `sequences`, which have `length` tokens in the cache."""
        return self._step(sequences, sequences, sequences * length, DECODE_ARITHMETIC)

    def prompt(self, length: int) -> float:
        """A prompt of `length` tokens, in steps of the token budget, to its last token's logits."""
        seconds, budget = 0.0, self._plan.token_budget
        for past in range(0, length, budget):
            count = min(budget, length - past)
            seen = count * past + count * (count + 1) // 2
            seconds += self._step(count, 1, seen, PREFILL_ARITHMETIC)
        return seconds

    def _step(self, tokens: int, rows: int, seen: int, share: float) -> float:
        """`tokens` new ones that attend to `seen` others altogether, `rows` of logits."""
        spec, rates = self._spec, self._rates
        reading = (self._weights + self._head) / (WEIGHT_READING * rates.bandwidth)
        operations = 2 * (tokens * self._elements + rows * spec.vocab_size * spec.hidden_size)
        linear = max(reading, operations / (share * rates.integer_rate))
        cached = seen if tokens == rows else seen / tokens
        attention = max(
            cached * self._plan.kv_token / (KV_READING * rates.bandwidth),
            4 * seen * spec.q_size * spec.num_layers / (ATTENTION_ARITHMETIC * rates.integer_rate),
        )
        computing = STEP + spec.num_layers * (LAYER + tokens * _elements(spec) * TOKEN_ELEMENT)
        computing += linear + attention
        return max(computing, self._streamed / rates.disk_bandwidth) if rates.disk_bandwidth else computing


def _elements(spec: ModelSpec) -> int:
    """Of a token's rows in a layer, which norms, activations and roundings pass over."""
    return 4 * spec.hidden_size + spec.q_size + 2 * spec.kv_size + 3 * spec.intermediate_size
