"""How fast a planned run will be, from the roofline: bytes that have to be read over the bandwidth,
operations over the integer rate, whichever takes longer, and for streamed weights what the disk gives."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ..models.spec import ModelSpec
from .kernels import MachineLimits
from .memory_plan import MemoryPlan, RunSettings
from .model_bytes import HEAD_BITS, linears
from .packed_sizes import packed_bytes
from .profile import DeviceProfile, KvDtype
from .streaming import total_experts

# What a step takes besides, in seconds: the engine and the sampler; the phases of a layer, between which
# threads wait for each other.
STEP, LAYER = 0.5e-3, 15e-6


@dataclass(frozen=True)
class Efficiency:
    """The shares of the limits that the kernels were measured to reach, by bits of a weight: of the bandwidth
    in reading weights for one token; of the integer rate in linear layers. And of attention, whose sums are
    in float32: what it reaches of the integer rate for one new token, by the cache's type, and for many.
    `element` is in seconds: of an element of a token's rows, which norms, activations and roundings pass
    over."""

    reading: Mapping[int, float]
    arithmetic: Mapping[int, float]
    attention: Mapping[KvDtype, float]
    chunk_attention: float
    element: float


# Kernels with a dot-product instruction (AVX-512 VNNI, AVX-VNNI, NEON). After the first, with SmolLM2 on two
# cores: 77 % of the bandwidth in a whole decode step, two thirds of the integer rate in a prompt's products.
DOT = Efficiency(
    {4: 0.85, 8: 0.85}, {4: 0.65, 8: 0.65}, {"f32": 0.05, "f16": 0.05, "int8": 0.06}, 0.13, 0.5e-9
)
# Without one, where 8-bit weights are widened to 16 bits first. Measured with AVX2 on two cores of an EPYC:
# `benchmarks/plan.py`.
WIDENING = Efficiency(
    {4: 0.69, 8: 0.6}, {4: 0.48, 8: 0.25}, {"f32": 0.095, "f16": 0.095, "int8": 0.115}, 0.4, 0.5e-9
)
# ONNX Runtime on a GPU. Our assumption: nothing was measured.
GPU = Efficiency({4: 0.7, 8: 0.7}, {4: 0.4, 8: 0.4}, {"f32": 0.1, "f16": 0.1, "int8": 0.1}, 0.2, 0.0)


@dataclass(frozen=True)
class Rates:
    """What a machine can do at most: bytes per second from memory, operations per second of the int8 dot
    product, bytes per second from disk (None where it is not known); and what the kernels reach of it."""

    bandwidth: float
    integer_rate: float
    disk_bandwidth: float | None = None
    efficiency: Efficiency = DOT

    @classmethod
    def of(cls, profile: DeviceProfile) -> "Rates | None":
        """A profile's, None where it does not say."""
        if profile.bandwidth is None or profile.integer_rate is None:
            return None
        efficiency = DOT if profile.memory_kind == "host" else GPU
        return cls(profile.bandwidth, profile.integer_rate, profile.disk_bandwidth, efficiency)

    @classmethod
    def measured(cls, limits: MachineLimits, disk_bandwidth: float | None = None) -> "Rates":
        """Those of this machine."""
        efficiency = WIDENING if limits.isa in ("avx2", "scalar") else DOT
        return cls(limits.read_bandwidth, limits.integer_rate, disk_bandwidth, efficiency)


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
        share = self._rates.efficiency.attention[self._plan.kv_dtype]
        return self._step(sequences, sequences, sequences * length, share)

    def prompt(self, length: int) -> float:
        """A prompt of `length` tokens, in steps of the token budget, to its last token's logits."""
        share = self._rates.efficiency.chunk_attention
        seconds, budget = 0.0, self._plan.token_budget
        for past in range(0, length, budget):
            count = min(budget, length - past)
            seconds += self._step(count, 1, count * past + count * (count + 1) // 2, share)
        return seconds

    def _step(self, tokens: int, rows: int, pairs: int, share: float) -> float:
        """`tokens` new ones, `rows` of logits. `pairs` of a new token and one that it attends to are computed
        at `share` of the integer rate."""
        spec, rates = self._spec, self._rates
        seconds = STEP + spec.num_layers * (LAYER + tokens * _elements(spec) * rates.efficiency.element)
        seconds += self._layers.seconds(tokens, rates) + self._head.seconds(rows, rates)
        seconds += 4 * pairs * spec.q_size * spec.num_layers / (share * rates.integer_rate)
        disk = rates.disk_bandwidth or math.inf
        experts = 0.0
        if (mixture := spec.mixture) is not None:
            active = mixture.experts_per_token / mixture.num_experts
            # Read is what any token chose, computed what each did.
            chosen = 1 - (1 - active) ** tokens
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
        """Of reading them once, or of the operations, whichever is more; of them, the shares that are `read`
        at all and `computed` for a token."""
        reading = read * self.bytes / (rates.efficiency.reading[self.bits] * rates.bandwidth)
        operations = 2 * tokens * computed * self.elements
        return max(reading, operations / (rates.efficiency.arithmetic[self.bits] * rates.integer_rate))


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
