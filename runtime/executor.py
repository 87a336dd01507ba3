"""The contract between the engine and whatever runs the decoder."""

from collections.abc import Collection, Sequence
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ..models.spec import ModelSpec
from ..records import dataclass
from .batch import Batch
from .sampler import TokenRule

KvDtype = Literal["f32", "f16", "int16", "int8"]
# Raised whenever the same weights and tokens would give other bits: pages saved before are not used then.
NUMERICS_VERSION = 2
# What `Executor.decode` gives in place of a token.
NO_NUMBERS, NONE_LEFT = -1, -2


@dataclass(frozen=True)
class KvLayout:
    """The executor's cache: `num_blocks` pages of `page_size` tokens in every layer. Page p is the same
    tokens in all layers of a window group; in another group it may be others."""

    num_blocks: int
    page_size: int
    kv_dtype: KvDtype
    bytes_per_block: int  # a page of each window group: all layers together
    # Of one page of each window group: its layers together. One group has all layers.
    group_bytes: tuple[int, ...] = ()
    page_format: str = ""  # how a page's bytes are arranged: the executor and a version

    def __post_init__(self) -> None:
        if not self.group_bytes:
            object.__setattr__(self, "group_bytes", (self.bytes_per_block,))


class Executor(Protocol):
    """Runs the decoder on one batch. Holds the weights and the cache; knows nothing of requests."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that a step reads."""
        ...

    @property
    def skipped_bytes(self) -> int:
        """Of these, what the last call of `step` or `decode` did without, all its steps together."""
        ...

    @property
    def kv_layout(self) -> KvLayout: ...

    def allocate_kv(self, num_blocks: int, page_size: int, kv_dtype: KvDtype) -> None: ...

    def step(self, batch: Batch) -> NDArray[np.float32]:
        """Writes the new tokens' keys and values into the cache and returns logits [R, vocab] float32."""
        ...

    @property
    def best_tokens(self) -> Sequence[int] | None:
        """Where each row of the last step's logits has its highest, the first of several, as `numpy.argmax`
        has it; None where the executor leaves it to the caller to look."""
        ...

    @property
    def decode_steps(self) -> int:
        """The most steps that `decode` takes in a call; 0: this executor has none."""
        ...

    def decode(
        self,
        batch: Batch,
        steps: int,
        ends: Collection[int],
        seconds: float,
        rules: Sequence[TokenRule] = (),
    ) -> list[list[int]]:
        """At least one step and at most `steps`, each with the tokens chosen from the one before: they have
        the bits that calls of `step` give. Comes back early after a step that chose one of the tokens `ends`,
        or that came to its end when so many `seconds` had passed or `hurry` was wanted.

        The batch is the first step's: of each sequence one token, whose row is wanted. The tokens after it
        have the next slots of the sequence's pages; the block table has those of all `steps`. `rules` says of
        each sequence how its tokens are chosen; without any they are where the highest logits are.
        Returns of each step the tokens chosen, [steps taken][B]: `NO_NUMBERS` where a row's highest logit is
        no finite number and `NONE_LEFT` where there is none after a rule's changes; no step is taken after
        those. Raises what `step` raises, for any of its steps; what those before chose is lost then, and the
        slots of all may hold anything."""
        ...

    def hurry(self, wanted: bool) -> None:
        """Whether `decode` comes back after the step that it is in. May be called from any thread."""
        ...

    def copy_blocks(self, src: NDArray[np.int32], dst: NDArray[np.int32], group: int = 0) -> None:
        """Copies page src[i] to dst[i] in the layers of a window group, as if all were read first."""
        ...

    def read_blocks(self, ids: NDArray[np.int32], group: int = 0) -> bytes:
        """What pages of a window group hold, `kv_layout.group_bytes[group]` bytes for each in order."""
        ...

    def write_blocks(self, ids: NDArray[np.int32], data: bytes, group: int = 0) -> None:
        """Puts back what `read_blocks` gave, of this or another cache of the same layout."""
        ...

    def swap_is_cheaper(self, tokens: int) -> bool:
        """Whether a preempted sequence's pages of that many tokens are sooner read into host memory and
        written back than computed again."""
        ...

    def close(self) -> None: ...
