"""How fast a planned run will be, from the roofline: bytes that have to be read over the bandwidth,
operations over the integer rate, whichever takes longer, and for streamed weights what the disk gives."""

import math
from collections.abc import Mapping
from dataclasses import replace

from ..models.spec import ModelSpec
from ..records import dataclass
from .bandwidth import Bandwidth
from .kernels import MachineLimits
from .memory_plan import MemoryPlan, RunSettings
from .model_bytes import HEAD_BITS, linears
from .packed_sizes import packed_bytes
from .profile import DeviceProfile, KvDtype
from .streaming import total_experts

# What a step takes besides, in seconds: the engine, and the sampler for each sequence; the phases of a layer,
# between which threads wait for each other.
STEP, SEQUENCE, LAYER = 0.45e-3, 0.05e-3, 15e-6
# Of what is read while it is computed with: 1 where the times add up, infinite where the longer one is all.
OVERLAP = 1.4
FEW = 16  # tokens, up to which a product is computed without panels


@dataclass(frozen=True)
class Efficiency:
    """The shares of the limits that the kernels were measured to reach, by bits of a weight: of the bandwidth
    in reading weights; of the integer rate in linear layers, for one token, a few and many. And of attention,
    by the cache's type: what it reaches of the integer rate for one new token, and for many. `element` is in
    seconds: of an element of a token's rows, which norms, activations and roundings pass over."""

    reading: Mapping[int, float]
    arithmetic: Mapping[int, tuple[float, float, float]]
    attention: Mapping[KvDtype, float]
    chunk_attention: Mapping[KvDtype, float]
    element: float


# Kernels with a dot-product instruction (AVX-512 VNNI, AVX-VNNI, NEON), after the first on two cores of an
# EPYC (Zen 4): `benchmarks/plan.py`.
DOT = Efficiency(
    reading={4: 1.0, 8: 0.88},
    arithmetic={4: (0.41, 0.52, 0.64), 8: (0.3, 0.5, 0.6)},
    attention={"f32": 0.071, "f16": 0.071, "int16": 0.071, "int8": 0.113},
    chunk_attention={"f32": 0.18, "f16": 0.18, "int16": 0.28, "int8": 0.33},
    element=0.5e-9,
)
# Without one, where 8-bit weights are widened to 16 bits first: after AVX2 on the same EPYC, 20 cases of it
# being within 20 %. An older one was a third off at most.
WIDENING = Efficiency(
    reading={4: 0.95, 8: 0.83},
    arithmetic={4: (0.71, 0.71, 0.71), 8: (0.44, 0.44, 0.44)},
    attention={"f32": 0.135, "f16": 0.135, "int16": 0.135, "int8": 0.21},
    chunk_attention={"f32": 0.4, "f16": 0.4, "int16": 0.4, "int8": 0.4},
    element=0.5e-9,
)
# ONNX Runtime on a GPU. Our assumption: nothing was measured.
GPU = Efficiency(
    reading={4: 0.7, 8: 0.7},
    arithmetic={4: (0.4, 0.4, 0.4), 8: (0.4, 0.4, 0.4)},
    attention={"f32": 0.1, "f16": 0.1, "int16": 0.1, "int8": 0.1},
    chunk_attention={"f32": 0.2, "f16": 0.2, "int16": 0.2, "int8": 0.2},
    element=0.0,
)


@dataclass(frozen=True)
class Rates:
    """What a machine can do at most: bytes per second from memory, operations per second of the int8 dot
    product, bytes per second from disk (None where it is not known); what the kernels reach of it; and how
    many bytes of what every step reads come from the last cache."""

    bandwidth: float
    integer_rate: float
    disk_bandwidth: float | None = None
    efficiency: Efficiency = DOT
    cached_bytes: float = 0.0

    @classmethod
    def of(cls, profile: DeviceProfile) -> "Rates | None":
        """A profile's, None where it does not say."""
        if profile.bandwidth is None or profile.integer_rate is None:
            return None
        efficiency = DOT if profile.memory_kind == "host" else GPU
        cached = profile.cached_bytes or 0
        return cls(profile.bandwidth, profile.integer_rate, profile.disk_bandwidth, efficiency, cached)

    @classmethod
    def measured(cls, limits: MachineLimits, disk_bandwidth: float | None = None) -> "Rates":
        """Those of this machine."""
        efficiency = WIDENING if limits.isa in ("avx2", "scalar") else DOT
        read = limits.bandwidth
        return cls(read.memory, limits.integer_rate, disk_bandwidth, efficiency, read.cached)

    def reading(self, size: float) -> "Rates":
        """With the bandwidth of a step that reads so many bytes."""
        return replace(
            self, bandwidth=Bandwidth(self.bandwidth, self.cached_bytes).at(size), cached_bytes=0.0
        )


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
    without rates, without the disk's where weights are streamed, and for what was not looked into: ONNX
    Runtime on a CPU, unquantized models."""
    if rates is None or (plan.residency.streams and rates.disk_bandwidth is None):
        return None
    if run.executor == "ort" and (run.profile.memory_kind == "host" or run.recipe is None):
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
        residency, slots = plan.residency, plan.residency.expert_slots
        streamed = sum(sizes.layers[layer].read(slots > 0) for layer in residency.streamed_layers)
        self._streamed = streamed + (sizes.embedding if residency.streamed_head else 0)
        self._streamed_experts = 0.0  # bytes, were all read that are not in memory
        if slots:
            missing = 1 - min(1.0, slots / total_experts(spec))
            self._streamed_experts = missing * sum(layer.experts for layer in sizes.layers)
        elements = sum(linear.out_features * linear.in_features for linear in linears(spec))
        linear_bytes = sum(layer.linears for layer in sizes.layers)
        bits = 4 if 8 * linear_bytes < 7 * elements else 8
        experts = _expert_elements(spec)
        bytes_of = linear_bytes / elements
        self._layers = Product(int(bytes_of * (elements - experts)), elements - experts, bits)
        self._experts = Product(int(bytes_of * experts), experts, bits)
        self._head = Product(sizes.embedding, spec.vocab_size * spec.hidden_size, HEAD_BITS)

    def decode(self, length: int, sequences: int) -> float:
        """A step of one new token for each of `sequences`, which have `length` tokens in the cache."""
        cached = sequences * length
        kv_bytes = cached * self._plan.kv_token
        rates = self._rates.reading(self._weights(sequences) + kv_bytes)
        reading = kv_bytes / rates.bandwidth
        computing = self._attention(cached, rates.efficiency.attention)
        return self._step(sequences, sequences, _together(reading, computing), rates)

    def prompt(self, length: int) -> float:
        """A prompt of `length` tokens, in steps of the token budget, to its last token's logits."""
        seconds, budget = 0.0, self._plan.token_budget
        for past in range(0, length, budget):
            count = min(budget, length - past)
            pairs = count * past + count * (count + 1) // 2
            attention = self._attention(pairs, self._rates.efficiency.chunk_attention)
            seconds += self._step(count, 1, attention, self._rates.reading(self._weights(count)))
        return seconds

    def _attention(self, pairs: int, shares: Mapping[KvDtype, float]) -> float:
        """Of computing so many pairs of a new token and one that it attends to."""
        share = shares[self._plan.kv_dtype]
        operations = 4 * pairs * self._spec.q_size * self._spec.num_layers
        return operations / (share * self._rates.integer_rate)

    def _weights(self, tokens: int) -> float:
        """Bytes of weights that a step of so many new tokens reads."""
        return self._layers.bytes + self._head.bytes + self._chosen(tokens) * self._experts.bytes

    def _chosen(self, tokens: int) -> float:
        """The share of all experts that any of so many tokens chooses, were all equally likely."""
        mixture = self._spec.mixture
        return 0.0 if mixture is None else 1 - (1 - mixture.experts_per_token / mixture.num_experts) ** tokens

    def _step(self, tokens: int, rows: int, attention: float, rates: Rates) -> float:
        """`tokens` new ones, `rows` of logits, and so many seconds of attention."""
        spec = self._spec
        seconds = STEP + rows * SEQUENCE
        seconds += spec.num_layers * (LAYER + tokens * _elements(spec) * rates.efficiency.element)
        seconds += self._layers.seconds(tokens, rates) + self._head.seconds(rows, rates) + attention
        disk = rates.disk_bandwidth or math.inf
        experts = 0.0
        if (mixture := spec.mixture) is not None:
            # Read is what any token chose, computed what each did.
            active, chosen = mixture.experts_per_token / mixture.num_experts, self._chosen(tokens)
            experts = self._experts.seconds(tokens, rates, chosen, active)
            if self._streamed_experts:
                # From the disk it is read after the choice, while the layer's others are computed.
                experts = max(experts, chosen * self._streamed_experts / disk)
                return experts + max(seconds, self._streamed / disk)
        return max(seconds + experts, self._streamed / disk)


@dataclass(frozen=True)
class Product:
    """Matrices that the tokens of a step are multiplied with."""

    bytes: int
    elements: int
    bits: int  # of most of its weights

    def seconds(self, tokens: int, rates: Rates, read: float = 1.0, computed: float = 1.0) -> float:
        """Of reading them once while computing; of them, the shares that are `read` at all and `computed` for
        a token."""
        reading = read * self.bytes / (rates.efficiency.reading[self.bits] * rates.bandwidth)
        one, few, many = rates.efficiency.arithmetic[self.bits]
        share = one if tokens == 1 else few if tokens <= FEW else many
        computing = 2 * tokens * computed * self.elements / (share * rates.integer_rate)
        return _together(reading, computing)


def _together(reading: float, computing: float) -> float:
    """Seconds of both, which go on at the same time, but not perfectly: two that take as long take 1.6 times
    that."""
    return float((reading**OVERLAP + computing**OVERLAP) ** (1 / OVERLAP))


def _elements(spec: ModelSpec) -> float:
    """Of a token's rows in a layer, which norms, activations and roundings pass over."""
    elements = 4.0 * spec.hidden_size + spec.q_size + 2 * spec.kv_size
    if (mixture := spec.mixture) is None:
        return elements + 3 * spec.intermediate_size
    share = len(mixture.layers) / spec.num_layers
    rows = mixture.experts_per_token * (3 * mixture.intermediate_size + 2 * spec.hidden_size)
    rows += 3 * mixture.shared_intermediate_size
    return elements + (1 - share) * 3 * spec.intermediate_size + share * rows


def _expert_elements(spec: ModelSpec) -> int:
    """Weights of all experts but the shared ones."""
    mixture = spec.mixture
    if mixture is None:
        return 0
    return 3 * len(mixture.layers) * mixture.num_experts * mixture.intermediate_size * spec.hidden_size
