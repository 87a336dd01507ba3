"""`CpuExecutor`: the decoder in C++ kernels, one call a step. A row's logits depend on its sequence's tokens,
the weights and the KV type, and on nothing else: not the batch, the chunks, the threads or the pages."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ..devices.kernels import choose_isa
from ..devices.residency import ResidencyPlan
from ..errors import (
    AllocationError,
    DoesNotFitError,
    ExecutorError,
    SettingError,
    UnsupportedModelError,
)
from ..export.weights import LogicalWeights
from ..models.spec import ModelSpec
from .batch import Batch
from .batch_check import DIMENSIONS, check_group, check_kinds
from .executor import KvDtype, KvLayout
from .packed_weights import HALVES, FreshlyPacked, PackedLinear, PackedSource
from .sampler import Changes, TokenRule
from .streaming import READ_TIMEOUT, ExpertReads, check_residency, stream_of

PAGE_SIZE = 16
# Steps of decodes in one call: what Python takes between two calls is a small part of so many.
DECODE_STEPS = 8
PAGE_FORMAT = "cpu-1"  # kernels/layout.h's KvShape
KV_TYPES: dict[KvDtype, int] = {"f32": 0, "f16": 1, "int16": 3, "int8": 2}
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "relu": 2}
_NO_TOKENS = np.empty(0, np.int32), np.empty(0, np.float32)


class CpuExecutor:
    """Runs a quantized model on the processor. The weights are repacked a few rows at a time, so that none is
    held twice."""

    def __init__(
        self, weights: LogicalWeights, *, threads: int, max_position: int | None = None, isa: str = ""
    ) -> None:
        """`threads` counts the calling one. `max_position` is the longest context that will be used, in
        tokens, the model's by default. `isa` forces a set of kernels ("avx512vnni", "avx2", "scalar", ...);
        by default it is the one that the environment variable NYBBLE_ISA names, or the best this CPU has."""
        self._start(FreshlyPacked(weights), threads, max_position, isa)

    @classmethod
    def from_packed(
        cls,
        source: PackedSource,
        *,
        threads: int,
        max_position: int | None = None,
        isa: str = "",
        residency: ResidencyPlan | None = None,
        read_timeout: float = READ_TIMEOUT,
    ) -> Self:
        """The same over weights that are packed already, which are kept and not copied.

        What `residency` streams is read from the source's file in every step, and the step fails where no
        read ends for `read_timeout` seconds. Open the file with the same plan, so that nothing of it becomes
        resident before. Raises `SettingError` for a plan of another model or a source that has no file.
        """
        executor = cls.__new__(cls)
        executor._start(source, threads, max_position, isa, residency, read_timeout)
        return executor

    def _start(
        self,
        source: PackedSource,
        threads: int,
        max_position: int | None,
        isa: str,
        residency: ResidencyPlan | None = None,
        read_timeout: float = READ_TIMEOUT,
    ) -> None:
        isa = choose_isa(isa)
        residency = residency or ResidencyPlan(source.spec.num_layers)
        check_residency(source, residency, read_timeout)
        from .. import _kernels

        max_position = max_position or source.spec.max_position
        self._spec = source.spec.for_context(max_position)
        self._num_groups = max(1, len(source.spec.window_groups))
        self._layout: KvLayout | None = None
        try:
            builder = _kernels.DecoderBuilder(_config(self._spec, max_position))
            self._load(builder, source)
            stream = stream_of(builder, source, residency, read_timeout)
            self._decoder: Any = _kernels.Decoder(builder, threads, isa, stream)
        except ValueError as error:
            raise SettingError(str(error)) from None
        except MemoryError:
            raise DoesNotFitError("the model's weights do not fit in this machine's memory") from None
        self._logits = np.empty((1, self._decoder.logit_stride), np.float32)

    def _load(self, builder: Any, source: PackedSource) -> None:
        spec = self._spec
        # First, while little else is held: packing these takes most memory.
        embedding = _ends(source, spec.embedding_name)
        head = embedding if spec.tied_embeddings else _ends(source, spec.head_name)
        self._weight_bytes = head.tiles.nbytes
        builder.set_ends(
            # Here the head's multiplier costs nothing: what it does to a row, it does to the row's scales.
            self._norm(source, spec.final_norm_name) * np.float32(spec.logit_scale),
            embedding.tiles, embedding.slices_per_group, head.tiles, head.slices_per_group,
        )  # fmt: skip
        for layer in range(spec.num_layers):
            for index, linear in enumerate(spec.linears(layer)):
                packed = source.linear(linear.name)
                self._weight_bytes += packed.tiles.nbytes
                bias = source.vector(linear.bias_name) if linear.bias else None
                builder.set_linear(
                    layer, index, packed.tiles, packed.bits, packed.kind, packed.slices_per_group, bias,
                    packed.permutation,
                )  # fmt: skip
            if gates := [source.vector(name) for name in spec.gates(layer)]:
                builder.set_gates(layer, gates[0], gates[1] if len(gates) > 1 else None)
            norms = (*spec.layer_norms(layer), *spec.qk_norms(layer))
            builder.set_norms(layer, *(name and self._norm(source, name) for name in norms))

    def _norm(self, source: PackedSource, name: str) -> NDArray[np.float32]:
        weight, offset = source.vector(name), self._spec.norm_offset
        return weight + np.float32(offset) if offset else weight

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def weight_bytes(self) -> int:
        """Bytes of the tiles of all linear layers and the head: what a step reads."""
        return self._weight_bytes

    @property
    def skipped_bytes(self) -> int:
        """Bytes of the head that the last call did without: where only the highest logit was wanted."""
        return int(self._open().skipped_bytes)

    @property
    def isa(self) -> str:
        """The set of kernels in use."""
        return str(self._open().isa)

    @property
    def threads(self) -> int:
        """Threads that run a step, the calling one included."""
        return int(self._open().threads)

    def _open(self) -> Any:
        if self._decoder is None:
            raise ExecutorError("the executor is closed")
        return self._decoder

    @property
    def kv_layout(self) -> KvLayout:
        if self._layout is None:
            raise ExecutorError("the cache has not been allocated; call allocate_kv first")
        return self._layout

    def allocate_kv(self, num_blocks: int, page_size: int = PAGE_SIZE, kv_dtype: KvDtype = "f16") -> None:
        """A zeroed cache of `num_blocks` pages of 16 tokens, in place of an earlier one. Raises
        `SettingError` for another page size, `DoesNotFitError` where memory runs out: then there is none."""
        decoder = self._open()
        if page_size != PAGE_SIZE:
            raise SettingError(f"page_size is {page_size}; executor 'cpu' has pages of {PAGE_SIZE} tokens")
        if kv_dtype not in KV_TYPES:
            raise SettingError(f"kv_dtype is {kv_dtype!r}; expected one of {', '.join(KV_TYPES)}")
        if num_blocks < 1 or num_blocks * page_size >= 1 << 31:
            raise SettingError(f"num_blocks is {num_blocks}; expected at least 1, under 2**31 slots")
        self._layout = None
        try:
            decoder.allocate_kv(num_blocks, KV_TYPES[kv_dtype])
        except MemoryError:
            raise DoesNotFitError(
                f"a KV cache of {num_blocks} pages in {kv_dtype} does not fit in this machine's memory"
            ) from None
        of_layer = self._spec.group_of_layer
        group_bytes = tuple(decoder.page_bytes * of_layer.count(group) for group in range(self._num_groups))
        self._layout = KvLayout(num_blocks, page_size, kv_dtype, sum(group_bytes), group_bytes, PAGE_FORMAT)

    def reserve(self, tokens: int, sequences: int) -> None:
        """Buffers for steps of up to `tokens` tokens of `sequences` sequences: such a step allocates none.
        Raises `DoesNotFitError` where memory runs out."""
        decoder = self._open()
        try:
            decoder.reserve(tokens, sequences, sequences)
            if len(self._logits) < sequences:
                self._logits = np.empty((sequences, decoder.logit_stride), np.float32)
        except (ValueError, TypeError):
            raise SettingError(f"a step of {tokens} tokens of {sequences} sequences is too large") from None
        except MemoryError:
            raise DoesNotFitError(
                f"the buffers for {tokens} tokens of {sequences} sequences do not fit in the memory here"
            ) from None

    def step(self, batch: Batch) -> NDArray[np.float32]:
        """Logits [R, vocab] float32, valid until the next step. Raises `ExecutorError`: naming the array, for
        one that breaks the contract; naming file and layer, where streamed weights could not be read. Then
        the new tokens' slots hold anything, and the next step begins anew."""
        self._run(self._open().step, batch, bool(batch.best_only))
        return self._logits[: len(batch.logit_rows), : self._spec.vocab_size]

    @property
    def decode_steps(self) -> int:
        return DECODE_STEPS

    def decode(
        self,
        batch: Batch,
        steps: int,
        ends: Collection[int],
        seconds: float,
        rules: Sequence[TokenRule] = (),
    ) -> list[list[int]]:
        """Steps of decodes, as the contract has it. Raises as `step` does, for any of them, and for a rule
        that breaks it."""
        ends = [token for token in ends if 0 <= token < self._spec.vocab_size]
        limits = min(steps, DECODE_STEPS), ends, seconds
        chosen = self._run(self._open().decode, batch, *limits, [_kernel_rule(rule) for rule in rules])
        return chosen  # type: ignore[no-any-return]

    def hurry(self, wanted: bool) -> None:
        """Whether `decode` comes back after the step that it is in. May be called from any thread, and after
        `close`."""
        if (decoder := self._decoder) is not None:
            decoder.hurry(wanted)

    def _run(self, call: Callable[..., Any], batch: Batch, *arguments: Any) -> Any:
        try:
            if len(batch.logit_rows) > len(self._logits):
                shape = len(batch.logit_rows), self._open().logit_stride
                self._logits = np.empty(shape, np.float32)
            return call(
                batch.token_ids,
                batch.cu_seqlens,
                batch.past_lens,
                batch.block_table,
                batch.slot_mapping,
                batch.logit_rows,
                self._logits,
                *arguments,
            )
        except (ValueError, TypeError) as error:
            raise ExecutorError(_contract_error(batch, error)) from None
        except RuntimeError as error:
            raise ExecutorError(str(error)) from None
        except MemoryError:
            raise AllocationError(f"memory ran out in a step of {len(batch.token_ids)} tokens") from None

    @property
    def best_tokens(self) -> list[int]:
        return self._open().best_tokens  # type: ignore[no-any-return]

    @property
    def expert_reads(self) -> ExpertReads:
        """What was read so far of experts that are streamed."""
        return ExpertReads(*self._open().expert_counts)

    def copy_blocks(self, src: NDArray[np.int32], dst: NDArray[np.int32], group: int = 0) -> None:
        """Copies page src[i] to dst[i] in the layers of a window group, as if all were read first. Raises
        `ExecutorError` naming the argument that is wrong."""
        check_group(group, self._num_groups)
        _check_ids("src", src)
        _check_ids("dst", dst)
        if len(src) != len(dst) or len(np.unique(dst)) != len(dst):
            raise ExecutorError(f"dst has {len(dst)} pages; expected {len(src)} different ones")
        if np.isin(src, dst).any():
            self.write_blocks(dst, self.read_blocks(src, group), group)
        else:
            self._pages(lambda decoder: decoder.copy_blocks(src, dst, group))

    def read_blocks(self, ids: NDArray[np.int32], group: int = 0) -> bytes:
        """What pages of a window group hold, `kv_layout.group_bytes[group]` bytes for each in order: layer
        after layer."""
        check_group(group, self._num_groups)
        _check_ids("ids", ids)
        return bytes(self._pages(lambda decoder: decoder.read_blocks(ids, group)))

    def write_blocks(self, ids: NDArray[np.int32], data: bytes, group: int = 0) -> None:
        """Puts back what `read_blocks` gave. Raises `ExecutorError` for another number of bytes."""
        check_group(group, self._num_groups)
        _check_ids("ids", ids)
        if not isinstance(data, bytes):
            raise ExecutorError(f"data is {type(data).__name__}; expected bytes")
        self._pages(lambda decoder: decoder.write_blocks(ids, data, group))

    def swap_is_cheaper(self, tokens: int) -> bool:
        """Never: the pages are in host memory already, and a copy of them there frees none of it."""
        return False

    def _pages(self, call: Callable[[Any], Any]) -> Any:
        try:
            return call(self._open())
        except (ValueError, TypeError) as error:
            raise ExecutorError(str(error).splitlines()[0]) from None

    def close(self) -> None:
        """Ends the threads and frees weights and cache. May be called again."""
        self._decoder = None
        self._layout = None


def _config(spec: ModelSpec, max_position: int) -> dict[str, Any]:
    if spec.activation not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"activation {spec.activation!r} is not supported by executor 'cpu'; "
            f"supported: {', '.join(ACTIVATIONS)}"
        )
    windows = spec.sliding_windows or (None,) * spec.num_layers
    ropes = [spec.rope_index(layer) for layer in range(spec.num_layers)]
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.mlp_size,
        "num_layers": spec.num_layers,
        "num_heads": spec.num_heads,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_position": max_position,
        "norm_eps": spec.norm_eps,
        "activation": ACTIVATIONS[spec.activation],
        "attention_softcap": spec.attention_softcap or 0.0,
        "logit_softcap": spec.logit_softcap or 0.0,
        "embedding_scale": spec.embedding_scale,
        "softmax_scale": spec.softmax_scale,
        "residual_scale": spec.residual_scale,
        "qk_norm_per_head": spec.qk_norm_per_head,
        "ropes": [(rope.inv_freq().tolist(), rope.attention_factor) for rope in spec.ropes],
        "rope_of_layer": [-1 if rope is None else rope for rope in ropes],
        "window_of_layer": [w or 0 for w in windows],
        "group_of_layer": list(spec.group_of_layer),
        "num_groups": max(1, len(spec.window_groups)),
        "is_mixture": [spec.mixture_of(layer) is not None for layer in range(spec.num_layers)]
        if spec.mixture is not None
        else [],
        "mixture": asdict(spec.mixture) if spec.mixture is not None else {},
    }


def _ends(source: PackedSource, name: str) -> PackedLinear:
    """The embedding or the head: 8 bits, symmetric, in halves."""
    packed = source.linear(name)
    if packed.kind != HALVES or packed.permutation is not None:
        raise UnsupportedModelError(f"tensor {name} is not 8-bit symmetric, as embedding and head are")
    return packed


def _kernel_rule(rule: TokenRule) -> Any:
    from .. import _kernels

    sampling, changes = rule.sampling, rule.changes or Changes()
    (biased, bias), (counted, times) = changes.bias or _NO_TOKENS, changes.counts or _NO_TOKENS
    seen = _NO_TOKENS[0] if rule.seen is None else rule.seen
    try:
        return _kernels.TokenRule(
            sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p,
            sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty,
            rule.seed, rule.index, rule.position, biased, bias, seen, counted, times,
        )  # fmt: skip
    except (ValueError, TypeError) as error:
        raise ExecutorError(f"a token rule's {str(error).splitlines()[0]}") from None


def _check_ids(name: str, ids: Any) -> None:
    if (
        not isinstance(ids, np.ndarray)
        or (ids.dtype, ids.ndim) != (np.int32, 1)
        or not ids.flags.c_contiguous
    ):
        raise ExecutorError(f"{name} is no contiguous int32 array of one dimension")


def _contract_error(batch: Batch, error: Exception) -> str:
    """The binding's message, or, where it only says that a type does not match, which array it is."""
    if isinstance(error, ValueError):
        return str(error)
    try:
        check_kinds(batch)
    except ExecutorError as found:
        return str(found)
    for name in DIMENSIONS:
        if not getattr(batch, name).flags.c_contiguous:
            return f"{name} is not contiguous"
    return str(error).splitlines()[0]
