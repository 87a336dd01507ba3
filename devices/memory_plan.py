"""`RunSettings`, what is to run, and `MemoryPlan`, what it will hold."""

from typing import Literal

from ..errors import SettingError
from ..models.spec import ModelSpec
from ..quant.recipe import Recipe
from ..records import dataclass
from .profile import DeviceProfile, KvDtype
from .residency import ResidencyPlan

Half = Literal["onnx", "gptq", "bnb", "gguf"]  # what the weights are read from
ExecutorKind = Literal["cpu", "ort"]

# A tokenizer's tables: 16 MB for 49,152 tokens. A GGUF file's metadata, which it is built from, adds 9.
TOKENIZER_PER_TOKEN, GGUF_PER_TOKEN = 340, 190
# What building it takes for a moment, before any weights are there: 23 MB, and 46 from a GGUF file.
TOKENIZING_PER_TOKEN, GGUF_TOKENIZING_PER_TOKEN = 470, 950
# Logits of a scored text are wanted for every token; this bounds what they take in a step, in bytes.
SCORE_LOGITS_BYTES = 16 * 2**20
# Steps are not made smaller than this, in tokens: it would free little and cost much.
SMALLEST_STEP = 64


@dataclass(frozen=True)
class RunSettings:
    """A model and how it is to run under a profile, with `sequences` of up to `context` tokens each at once.

    None takes the profile's value; `context` None is the model's own where that is shorter. `recipe` None is
    an unquantized model. `half` is what the model is read from: `OrtExecutor` maps the ONNX half's weights
    and holds a checkpoint's in memory as well; for `CpuExecutor` both are the same. A GGUF file, which only
    that one runs, has no recipe; `linear_bytes` are those of each of its linear layers' tiles. `residency`
    None holds all weights in memory. Raises `SettingError` for a setting out of range.
    """

    spec: ModelSpec
    recipe: Recipe | None
    profile: DeviceProfile
    context: int | None = None  # tokens
    sequences: int = 1
    kv_dtype: KvDtype | None = None
    half: Half = "onnx"
    token_budget: int | None = None  # most new tokens of a step
    threads: int | None = None
    budget: int | None = None  # bytes
    executor: ExecutorKind = "ort"
    linear_bytes: tuple[int, ...] | None = None
    residency: ResidencyPlan | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.length <= self.spec.max_position:
            raise SettingError(
                f"context is {self.length}; expected 1 to {self.spec.max_position}, the model's own context"
            )
        if self.sequences < 1:
            raise SettingError(f"sequences is {self.sequences}; expected at least 1")

    @property
    def length(self) -> int:
        """`context`, or what stands for it."""
        return min(self.spec.max_position, self.profile.context) if self.context is None else self.context

    @property
    def kv(self) -> KvDtype:
        return self.kv_dtype or self.profile.kv_dtype

    @property
    def tokens(self) -> int:
        """The most new tokens of a step."""
        return self.token_budget or self.profile.token_budget

    @property
    def reached_tokens(self) -> int:
        """As many of them as a step can come to: all sequences' contexts hold no more."""
        return min(self.tokens, self.sequences * self.length)

    @property
    def logit_rows(self) -> int:
        """The most rows of logits of a step: one a sequence, or those of a scored text."""
        scored = max(1, SCORE_LOGITS_BYTES // (4 * self.spec.vocab_size))
        return max(self.sequences, min(scored, self.reached_tokens))


@dataclass(frozen=True)
class MemoryPlan:
    """What a run will hold, in bytes. `total` is the peak, to be compared with `budget`."""

    context: int  # tokens of one sequence
    sequences: int
    kv_dtype: KvDtype
    page_size: int
    num_pages: int
    token_budget: int  # most new tokens of a step
    residency: ResidencyPlan
    linears: int  # linear layers that stay in memory, as they lie in the file or in arrays
    ends: int  # embedding and head, where they stay in memory
    norms: int  # norms and biases
    buffers: int  # what streamed weights are read into, and what is kept there of experts
    packed: int  # ONNX Runtime's own rearranged copy of the quantized weights
    kv_token: int  # one token's keys and values in all layers
    kv: int
    activations: int
    tokenizer: int
    interpreter: int  # Python and its libraries, ONNX Runtime's session
    tokenizing: int  # held only while the tokenizer is built, before any weights are there
    loading: int  # held only while loading weights: what is being packed of them, in its old form
    budget: int | None
    concessions: tuple[str, ...] = ()  # what was given up to keep to the budget, a sentence each

    @property
    def weights(self) -> int:
        """All that stays in memory of the model's tensors."""
        return self.linears + self.ends + self.norms

    @property
    def runtime(self) -> int:
        """What any model needs besides its own tensors and cache."""
        return self.interpreter + self.tokenizer

    @property
    def kv_page(self) -> int:
        """Bytes of a page in all layers."""
        return self.kv // self.num_pages

    @property
    def total(self) -> int:
        """Bytes at the peak: of building the tokenizer, of loading weights or of running."""
        running = max(self.loading, self.buffers + self.kv + self.activations)
        return self.runtime + max(self.tokenizing, self.weights + self.packed + running)

    @property
    def fits(self) -> bool:
        return self.budget is None or self.total <= self.budget
