"""The C++ extension. Absent from the pure-Python wheel: import it inside a `try`."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

def cpu_info() -> dict[str, object]:
    """What this CPU is: `isa` (list of instruction sets that may be used), `brand`, and `caches`
    (list of dicts: `level`, `type`, `bytes`, `line_bytes`, `shared_by`)."""

def drop_code_pages() -> int:
    """Takes the libraries' code out of this process's resident memory; what is used comes back. Returns how
    many bytes were resident; 0 elsewhere than on Linux."""

def supported_kernels() -> list[str]:
    """Names of the instruction sets whose kernels are built and run on this CPU, best first."""

def multiply(
    x: NDArray[np.float32],
    tiles: NDArray[np.uint8],
    rows: int,
    bits: int,
    kind: int,
    slices_per_group: int,
    isa: str,
    panel: bool,
    y: NDArray[np.float32],
) -> None:
    """`y[:, :rows] = x Wᵀ` as the decoder computes it, on one thread: `x` [M, columns], `y` [M, rows padded
    to 16]. `panel` takes the path for many tokens. Raises `ValueError` naming the argument."""

def round_columns(
    weight: NDArray[np.float32],
    passed_on: NDArray[np.float32],
    scale: NDArray[np.float32],
    zero: NDArray[np.float32],
    group: NDArray[np.int32],
    bits: int,
    codes: NDArray[np.float32],
    errors: NDArray[np.float32],
) -> None:
    """GPTQ's loop over the columns of one block; shapes as in `quant.columns.round_columns`. Raises
    `ValueError` naming the argument."""

def descend_codes(
    hessian: NDArray[np.float32],
    steps: NDArray[np.float32],
    bits: int,
    codes: NDArray[np.float32],
    change: NDArray[np.float32],
) -> None:
    """Codes of one block take their best values in order; shapes as in `quant.columns.descend_codes`. Raises
    `ValueError` naming the argument."""

class DecoderBuilder:
    """Collects a decoder's weights; the arrays are kept and not copied."""

    def __init__(self, config: dict[str, Any]) -> None: ...
    def set_linear(
        self,
        layer: int,
        index: int,
        tiles: NDArray[np.uint8],
        bits: int,
        kind: int,
        slices_per_group: int,
        bias: NDArray[np.float32] | None,
        permutation: NDArray[np.int32] | None,
    ) -> None:
        """`index` counts q, k, v, o, gate, up, down from 0."""

    def set_norms(
        self,
        layer: int,
        input: NDArray[np.float32],
        post: NDArray[np.float32],
        q: NDArray[np.float32] | None,
        k: NDArray[np.float32] | None,
    ) -> None: ...
    def set_ends(
        self,
        norm: NDArray[np.float32],
        embedding: NDArray[np.uint8],
        embedding_slices: int,
        head: NDArray[np.uint8],
        head_slices: int,
    ) -> None: ...
    def stream_experts(self, layer: int, tiles: list[int]) -> None:
        """A layer whose experts are read when they are chosen: where the tiles of each one's gate, up and
        down begin in the file, without the shared one's. In ascending order, before `stream_layer`, after
        what it names has been set."""

    def stream_layer(self, layer: int, offset: int, bytes: int, tiles: list[int]) -> None:
        """A layer that is read in every step: its section of the file, or the part before such experts, and
        where its linear layers' tiles begin in the file, without theirs. In ascending order, after what it
        names has been set."""

    def stream_head(self, embedding_tiles: int, head_tiles: int) -> None:
        """The same for embedding and head."""

class StreamFile:
    """The open file that streamed weights are read from, into `buffers` buffers of `buffer_bytes` and, those
    of experts, into `expert_slots` slots of `slot_bytes`; a step fails where no read ends for `timeout`
    seconds. `file` is its name in messages."""

    def __init__(
        self,
        descriptor: int,
        file: str,
        buffers: int,
        buffer_bytes: int,
        expert_slots: int,
        slot_bytes: int,
        timeout: float,
    ) -> None: ...

class Decoder:
    """The whole decoder. Arrays that break the contract raise `ValueError` naming the argument."""

    def __init__(
        self, builder: DecoderBuilder, threads: int, isa: str, stream: StreamFile | None = None
    ) -> None: ...
    def allocate_kv(self, num_blocks: int, kv_type: int) -> None: ...
    def reserve(self, tokens: int, sequences: int, rows: int) -> None: ...
    def step(
        self,
        token_ids: NDArray[np.int32],
        cu_seqlens: NDArray[np.int32],
        past_lens: NDArray[np.int32],
        block_table: NDArray[np.int32],
        slot_mapping: NDArray[np.int32],
        logit_rows: NDArray[np.int32],
        logits: NDArray[np.float32],
        best_only: bool = False,
    ) -> None:
        """Writes `logits` [R or more, `logit_stride`]; with `best_only` others than a row's highest may be
        -infinity. Releases the GIL. Raises `RuntimeError` where streamed weights could not be read."""

    def decode(
        self,
        token_ids: NDArray[np.int32],
        cu_seqlens: NDArray[np.int32],
        past_lens: NDArray[np.int32],
        block_table: NDArray[np.int32],
        slot_mapping: NDArray[np.int32],
        logit_rows: NDArray[np.int32],
        logits: NDArray[np.float32],
        steps: int,
        ends: list[int],
        seconds: float,
        rules: list[TokenRule],
    ) -> list[list[int]]:
        """`Executor.decode`; `logits` are overwritten. Without rules the highest logit's token is chosen.
        Releases the GIL. Raises as `step` does."""

    def hurry(self, wanted: bool) -> None: ...
    def copy_blocks(self, src: NDArray[np.int32], dst: NDArray[np.int32], group: int) -> None: ...
    def read_blocks(self, ids: NDArray[np.int32], group: int) -> bytes: ...
    def write_blocks(self, ids: NDArray[np.int32], data: bytes, group: int) -> None: ...
    @property
    def best_tokens(self) -> list[int]:
        """Where each row of the last step's logits has its highest."""

    @property
    def logit_stride(self) -> int: ...
    @property
    def page_bytes(self) -> int:
        """Bytes of a page in one layer."""

    @property
    def isa(self) -> str: ...
    @property
    def threads(self) -> int: ...
    @property
    def skipped_bytes(self) -> int:
        """Bytes of the head that the last call did without."""

    @property
    def step_bytes(self) -> int:
        """Bytes of the buffers that steps of the reserved sizes write to."""

    @property
    def expert_counts(self) -> list[int]:
        """Of experts that are read when they are chosen, since the start: how many layers of steps needed,
        how many of them were read, and their bytes."""

class TokenRule:
    """How `Decoder.decode` chooses the tokens of a sequence, as `runtime/sampler.py` does it."""

    def __init__(
        self,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        repetition_penalty: float,
        frequency_penalty: float,
        presence_penalty: float,
        seed: int,
        index: int,
        position: int,
        biased: NDArray[np.int32],
        bias: NDArray[np.float32],
        seen: NDArray[np.int32],
        counted: NDArray[np.int32],
        times: NDArray[np.float32],
    ) -> None:
        """`biased`, `seen` and `counted` hold tokens, each once. Raises `ValueError` naming the argument."""

class TokenSampler:
    """Chooses a token from a row of logits as `runtime/sampler.py` does in numpy, in float32."""

    def __init__(self, isa: str) -> None: ...
    def draw(
        self,
        logits: NDArray[np.float32],
        top: float,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        number: float,
    ) -> int:
        """The token at `number`, in [0, 1), of what the filters leave, ids ascending; `top` is the largest of
        `logits` [vocab]. Raises `ValueError` naming the argument."""

class MemoryRead:
    """A buffer of `bytes`, rounded up to equal parts, for reading it as fast as `threads` can. Raises
    `ValueError` naming the argument, `MemoryError`."""

    def __init__(self, threads: int, bytes: int) -> None: ...
    def run(self) -> float:
        """Reads all of it once; seconds. Releases the GIL."""

    @property
    def bytes(self) -> int: ...

class LinearProduct:
    """`y[:, :rows] = x Wᵀ` as the decoder's threads compute it, without what surrounds it in a step: `x`
    [M, columns] is quantized once, `y` is [M, rows padded to 16]. Raises `ValueError` naming the argument."""

    def __init__(
        self,
        threads: int,
        isa: str,
        x: NDArray[np.float32],
        tiles: NDArray[np.uint8],
        rows: int,
        bits: int,
        kind: int,
        slices_per_group: int,
        y: NDArray[np.float32],
    ) -> None: ...
    def run(self, repeats: int) -> float:
        """Seconds of so many products, one after the other. Releases the GIL."""

class DotLoop:
    """`threads` that do nothing but dot products of registers. Raises `ValueError` naming the argument."""

    def __init__(self, threads: int, isa: str) -> None: ...
    def run(self, rounds: int) -> float:
        """Seconds of so many rounds. Releases the GIL."""

    @property
    def operations(self) -> int:
        """Of a round by all threads: a multiplication and an addition are two."""
