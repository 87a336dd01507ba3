"""`OrtExecutor`: the decoder's graph in ONNX Runtime, on any execution provider."""

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ..errors import ExecutorError, ModelFormatError, SettingError
from ..export.onnx_contract import window_groups
from ..export.onnx_dependency import ir
from ..export.onnx_graph import build_decoder, set_accuracy_level, set_cache_type, set_ropes
from ..export.onnx_pages import PAGE_OPERATIONS, build_page_operation, cache_names, output_name
from ..export.onnx_reader import open_decoder
from ..export.onnx_writer import MemoryTensors
from ..export.weights import LogicalWeights
from ..models.spec import ModelSpec
from .batch import Batch
from .batch_check import check_batch, check_group
from .executor import KvDtype, KvLayout
from .ort_runs import MAX_RUN_TOKENS, split_step
from .ort_session import choose_providers, device_of, first_line, make_session, ort
from .sampler import TokenRule

_KV_TYPES: dict[str, Any] = {
    "f32": (np.float32, ir.DataType.FLOAT),
    "f16": (np.float16, ir.DataType.FLOAT16),
}
# Names of execution providers, best first, or (name, options).
Providers = Sequence[str | tuple[str, Mapping[str, str]]]
PAGE_FORMAT = "ort-1"  # [page_size, kv_heads, head_dim], keys then values of layer after layer
_INPUTS = ("token_ids", "cu_seqlens", "past_lens", "block_table", "slot_mapping", "logit_rows")


class OrtExecutor(AbstractContextManager["OrtExecutor"]):
    """An `Executor` over ONNX Runtime. Made by `from_file` or `from_weights`; ready for `step` once
    `allocate_kv` has made its cache.

    The same weights give the same logits, but ONNX Runtime's kernels differ by the shapes they run on:
    results depend on how a step is cut into batches within rounding.
    """

    def __init__(
        self,
        model: ir.Model,
        spec: ModelSpec,
        *,
        weight_bytes: int,
        providers: Providers | None = None,
        threads: int | None = None,
        max_run_tokens: int = MAX_RUN_TOKENS,
        folder: Path | None = None,
        tensors: dict[str, NDArray[Any]] | None = None,
        max_position: int | None = None,
    ) -> None:
        if threads is not None and threads < 1:
            raise SettingError(f"threads is {threads}; expected at least 1")
        if max_run_tokens < 1:
            raise SettingError(f"max_run_tokens is {max_run_tokens}; expected at least 1")
        self._providers = choose_providers(providers)
        self.weight_bytes = weight_bytes
        self._model: ir.Model | None = model
        self._spec = spec.for_context(max_position or spec.max_position)
        set_ropes(model, self._spec)
        self._threads, self._max_run_tokens = threads, max_run_tokens
        # A run reads every weight; gathering a token, its keys and values and those of each query head. On a
        # CPU a run was seen to take twice as long as that says.
        gathered = 2 * 4 * spec.num_layers * (spec.kv_size + spec.q_size)
        self._run_cost = 2 * weight_bytes // gathered
        self._folder, self._tensors = folder, tensors
        self._bindings: dict[str, tuple[Any, Any]] = {}  # graph's name: session and its binding
        self._layout: KvLayout | None = None
        self._caches: dict[str, Any] = {}
        self._arrays: list[NDArray[Any]] = []  # the caches' memory on a CPU; OrtValues do not keep it alive

    @classmethod
    def from_file(
        cls,
        path: Path,
        *,
        providers: Providers | None = None,
        threads: int | None = None,
        accuracy_level: int | None = None,
        max_run_tokens: int = MAX_RUN_TOKENS,
        max_position: int | None = None,
    ) -> Self:
        """Runs a `decoder.onnx`; its weights are mapped from the file beside it.

        `accuracy_level` overrides the graph's own: 0 keeps activations in float32, 4 rounds them to int8.
        `max_position` is the longest context that will be used, in tokens, the model's by default.
        Raises `ModelFormatError` for a damaged file, `SettingError` for a provider that is not there.
        """
        file = open_decoder(path)
        if file.contract != "paged":
            raise ModelFormatError(
                f"{path.name}: has the {file.contract} contract, for others; OrtExecutor runs the paged one"
            )
        if accuracy_level is not None:
            set_accuracy_level(file.model, accuracy_level)
        return cls(
            file.model,
            file.spec,
            weight_bytes=file.weight_bytes,
            providers=providers,
            threads=threads,
            max_run_tokens=max_run_tokens,
            max_position=max_position,
            folder=path.resolve().parent,
        )

    @classmethod
    def from_weights(
        cls,
        weights: LogicalWeights,
        *,
        providers: Providers | None = None,
        threads: int | None = None,
        accuracy_level: int = 4,
        max_run_tokens: int = MAX_RUN_TOKENS,
        max_position: int | None = None,
    ) -> Self:
        """Runs logical tensors, such as the GPTQ half's, through the same graph built in memory. Takes about
        the weights' size more than `from_file`, which maps them."""
        tensors = MemoryTensors()
        model = build_decoder(weights, accuracy_level=accuracy_level, store=tensors)
        return cls(
            model,
            weights.spec,
            weight_bytes=sum(array.nbytes for array in tensors.arrays.values()),
            providers=providers,
            threads=threads,
            max_run_tokens=max_run_tokens,
            max_position=max_position,
            tensors=tensors.arrays,
        )

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def providers(self) -> list[str]:
        """The execution providers in use, best first."""
        return [name for name, _ in self._providers]

    @property
    def kv_layout(self) -> KvLayout:
        if self._layout is None:
            raise ExecutorError("the cache is not there yet: allocate_kv comes first")
        return self._layout

    def allocate_kv(self, num_blocks: int, page_size: int, kv_dtype: KvDtype) -> None:
        """Makes a cache of zeros, in place of an earlier one. On a CPU, pages take memory when they are first
        written. Raises `SettingError` for int8, which `CpuExecutor` has."""
        if self._model is None:
            raise ExecutorError("the executor is closed")
        if kv_dtype not in _KV_TYPES:
            raise SettingError(
                f"kv_dtype is {kv_dtype}; OrtExecutor has f32 and f16, CpuExecutor int16 and int8 too"
            )
        if num_blocks < 1 or page_size < 1 or num_blocks * page_size >= 1 << 31:
            raise SettingError(
                f"num_blocks is {num_blocks}, page_size {page_size}; expected at least 1, under 2**31 slots"
            )
        dtype, graph_type = _KV_TYPES[kv_dtype]
        shape = (num_blocks, page_size, self._spec.num_kv_heads, self._spec.head_dim)
        names = cache_names(self._spec)
        if self._layout is None or self._layout.kv_dtype != kv_dtype:
            self._make_sessions(self._model, graph_type)
        self._layout, self._caches, self._arrays = None, {}, []
        device = device_of(self.providers)
        for name in names:
            array = np.zeros(shape, dtype)
            self._caches[name] = ort.OrtValue.ortvalue_from_numpy(array, device)
            if device == "cpu":
                self._arrays.append(array)
        for graph, (_, binding) in self._bindings.items():
            operation, _, group = graph.partition(" ")
            for name in cache_names(self._spec, int(group) if group else None):
                binding.bind_ortvalue_input(name, self._caches[name])
                if operation != "read":
                    binding.bind_ortvalue_output(output_name(name), self._caches[name])
        page_bytes = math.prod(shape[1:]) * np.dtype(dtype).itemsize
        groups = range(len(window_groups(self._spec)))
        group_bytes = tuple(len(cache_names(self._spec, group)) * page_bytes for group in groups)
        self._layout = KvLayout(num_blocks, page_size, kv_dtype, sum(group_bytes), group_bytes, PAGE_FORMAT)

    def _make_sessions(self, model: ir.Model, cache_type: ir.DataType) -> None:
        self._bindings, self._layout = {}, None  # frees the sessions of another cache type first
        set_cache_type(model, cache_type)
        settings: dict[str, Any] = {"providers": self._providers, "threads": self._threads}
        graphs: dict[str, tuple[ir.Model, dict[str, Any]]] = {
            f"{operation} {group}": (build_page_operation(self._spec, operation, group, cache_type), settings)
            for operation in PAGE_OPERATIONS
            for group in range(len(window_groups(self._spec)))
        }
        folder = None if self._folder is None else str(self._folder)
        graphs["decoder"] = (model, settings | {"folder": folder, "tensors": self._tensors})
        for name, (graph, options) in graphs.items():
            session = make_session(
                ir.to_proto(graph).SerializeToString(), what=f"the {name} graph", **options
            )
            self._bindings[name] = (session, session.io_binding())

    def step(self, batch: Batch) -> NDArray[np.float32]:
        """Runs the batch; sequences of unlike lengths or contexts, and pieces of long ones, in runs of their
        own. Raises `ExecutorError` naming an array that breaks the contract, before anything is run."""
        layout = self.kv_layout
        check_batch(
            batch,
            groups=len(window_groups(self._spec)),
            vocab_size=self._spec.vocab_size,
            num_blocks=layout.num_blocks,
            page_size=layout.page_size,
        )
        logits = np.empty((len(batch.logit_rows), self._spec.vocab_size), np.float32)
        for run in split_step(batch, layout.page_size, self._max_run_tokens, run_cost=self._run_cost):
            inputs = {name: getattr(run.batch, name) for name in _INPUTS}
            if len(run.logits) == len(logits):
                self._run("decoder", inputs, {"logits": logits})
                continue
            part = np.empty((len(run.logits), self._spec.vocab_size), np.float32)
            self._run("decoder", inputs, {"logits": part})
            logits[run.logits] = part
        return logits

    @property
    def skipped_bytes(self) -> int:
        return 0

    @property
    def best_tokens(self) -> None:
        return None

    @property
    def decode_steps(self) -> int:
        return 0

    def decode(
        self,
        batch: Batch,
        steps: int,
        ends: Collection[int],
        seconds: float,
        rules: Sequence[TokenRule] = (),
    ) -> list[list[int]]:
        raise ExecutorError("executor 'onnxruntime' takes one step a call")

    def hurry(self, wanted: bool) -> None:
        pass

    def copy_blocks(self, src: NDArray[np.int32], dst: NDArray[np.int32], group: int = 0) -> None:
        """Copies page src[i] to dst[i] in the layers of a window group, as if all were read first."""
        check_group(group, len(self.kv_layout.group_bytes))
        self._check_pages("src", src)
        self._check_pages("dst", dst)
        if len(src) != len(dst) or len(np.unique(dst)) != len(dst):
            raise ExecutorError(f"dst has {len(dst)} pages; expected {len(src)} different ones")
        if len(src):
            self._run(f"copy {group}", {"src": src, "dst": dst}, {})

    def read_blocks(self, ids: NDArray[np.int32], group: int = 0) -> bytes:
        """What pages of a window group hold, `kv_layout.group_bytes[group]` bytes for each in order: keys,
        then values of layer after layer."""
        check_group(group, len(self.kv_layout.group_bytes))
        self._check_pages("ids", ids)
        data = self._page_data(len(ids), group)
        if len(ids):
            self._run(f"read {group}", {"ids": ids}, {"data": data})
        return data.tobytes()

    def write_blocks(self, ids: NDArray[np.int32], data: bytes, group: int = 0) -> None:
        """Puts back what `read_blocks` gave. Raises `ExecutorError` for another number of bytes."""
        check_group(group, len(self.kv_layout.group_bytes))
        self._check_pages("ids", ids)
        target = self._page_data(len(ids), group)
        if len(data) != target.nbytes or len(np.unique(ids)) != len(ids):
            raise ExecutorError(f"data has {len(data)} bytes for {len(ids)} pages; expected {target.nbytes}")
        if len(ids):
            content = np.frombuffer(data, target.dtype).reshape(target.shape)
            self._run(f"write {group}", {"ids": ids, "data": content}, {})

    def swap_is_cheaper(self, tokens: int) -> bool:
        """Where the cache is in a device's memory: reading and writing a page moves its bytes, computing it
        reads all weights. Never on a CPU, where a copy of the pages frees no memory."""
        return tokens > 0 and device_of(self.providers) != "cpu"

    def _check_pages(self, name: str, ids: NDArray[np.int32]) -> None:
        count = self.kv_layout.num_blocks
        if not isinstance(ids, np.ndarray) or ids.dtype != np.int32 or ids.ndim != 1:
            raise ExecutorError(f"{name} is no int32 array of one dimension")
        if len(ids) and (ids.min() < 0 or ids.max() >= count):
            raise ExecutorError(f"{name} holds pages {ids.min()} to {ids.max()}; the cache has {count}")

    def _page_data(self, pages: int, group: int) -> NDArray[Any]:
        layout, spec = self.kv_layout, self._spec
        shape = (pages, len(cache_names(spec, group)), layout.page_size, spec.num_kv_heads, spec.head_dim)
        return np.empty(shape, _KV_TYPES[layout.kv_dtype][0])

    def _run(self, graph: str, inputs: dict[str, NDArray[Any]], outputs: dict[str, NDArray[Any]]) -> None:
        """Runs a graph on the cache in place; `outputs` are written where they are."""
        session, binding = self._bindings[graph]
        try:
            for name, array in inputs.items():
                binding.bind_cpu_input(name, array)
            for name, array in outputs.items():
                binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
            session.run_with_iobinding(binding)
        except Exception as error:  # ONNX Runtime's own exception types, of no common base
            raise ExecutorError(f"ONNX Runtime failed in the {graph} graph: {first_line(error)}") from None

    def close(self) -> None:
        """Gives weights and cache back. May be called again; nothing else may."""
        self._bindings, self._caches, self._arrays = {}, {}, []
        self._layout, self._tensors, self._model = None, None, None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
