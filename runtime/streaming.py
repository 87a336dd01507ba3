"""What `CpuExecutor` tells its kernels of streamed weights: `kernels/weight_stream.h` reads them."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from ..devices.packed_sizes import SECTION, TENSOR, padded
from ..devices.residency import ResidencyPlan
from ..errors import SettingError
from ..models.spec import ModelSpec
from .packed_file import MappedWeights
from .packed_weights import PackedLinear, PackedSource

READ_TIMEOUT = 30.0  # seconds
MOST_SECONDS = 1e6


class ExpertReads(NamedTuple):
    """Of experts that are streamed: how many the layers of steps needed, how many of them were not in memory,
    and the bytes that were read for those."""

    needed: int
    read: int
    bytes: int


def check_residency(source: PackedSource, residency: ResidencyPlan, read_timeout: float) -> None:
    """Raises `SettingError` for a plan of another model, for one that streams from no file, and for a time
    that is none."""
    if residency.num_layers != source.spec.num_layers:
        raise SettingError(
            f"residency is for {residency.num_layers} layers; the model has {source.spec.num_layers}"
        )
    if residency.expert_slots and source.spec.mixture is None:
        raise SettingError("residency has slots for experts; the model has no mixture of them")
    if residency.streams and not isinstance(source, MappedWeights):
        raise SettingError("residency streams weights; expected them in a file of packed weights")
    if not 0 < read_timeout < MOST_SECONDS:
        raise SettingError(
            f"read_timeout is {read_timeout}; expected over 0, under {MOST_SECONDS:.0f} seconds"
        )


def stream_of(builder: Any, source: PackedSource, residency: ResidencyPlan, read_timeout: float) -> Any:
    """The `_kernels.StreamFile` that a decoder reads streamed weights from, which `builder` is told of; None
    where all of them are resident. `builder` has been given all weights."""
    if not residency.streams:
        return None
    assert isinstance(source, MappedWeights)
    from .. import _kernels

    spec, file = source.spec, source.file
    if residency.expert_slots:
        for layer in spec.mixture.layers if spec.mixture is not None else ():
            tensors = file.layer(layer).tensors
            builder.stream_experts(layer, [tensors[name] for name in spec.expert_names(layer)])
    for layer in residency.streamed_layers:
        section = file.layer(layer)
        left_out = set(spec.expert_names(layer)) if residency.expert_slots else ()
        names = [linear.name for linear in spec.linears(layer) if linear.name not in left_out]
        tiles = [section.tensors[name] for name in names]
        builder.stream_layer(layer, section.offset, _read_bytes(source, residency, layer), tiles)
    if residency.streamed_head:
        tensors = file.ends.tensors
        builder.stream_head(tensors[spec.embedding_name], tensors[_head_name(spec)])
    return _kernels.StreamFile(
        file.descriptor,
        str(file.path),
        residency.buffers,
        buffer_bytes(source, residency),
        residency.expert_slots,
        residency.slot_bytes(largest_expert(source)),
        read_timeout,
    )


def buffer_bytes(source: MappedWeights, residency: ResidencyPlan) -> int:
    """Bytes of each of the plan's buffers for this model."""
    layers = [_read_bytes(source, residency, layer) for layer in range(source.spec.num_layers)]
    head = source.linear(_head_name(source.spec))
    return residency.buffer_bytes(layers, head.block_bytes)


def largest_expert(source: MappedWeights) -> int:
    """Bytes of the largest expert in the file, shared ones left out; 0 for a model without."""
    sizes = [0]
    for layer in range(source.spec.num_layers):
        linears = [_bytes_in_file(source.linear(name)) for name in source.spec.expert_names(layer)]
        sizes += [sum(linears[i : i + 3]) for i in range(0, len(linears), 3)]
    return max(sizes)


def _bytes_in_file(linear: PackedLinear) -> int:
    permutation = 0 if linear.permutation is None else linear.permutation.nbytes
    return padded(linear.tiles.nbytes, TENSOR) + padded(permutation, TENSOR)


def streamed_bytes(source: MappedWeights, residency: ResidencyPlan) -> int:
    """Bytes of weights that every step with logits reads from the file: not those of chosen experts."""
    return sum(_streamed(source, residency))


def _read_bytes(source: MappedWeights, residency: ResidencyPlan, layer: int) -> int:
    """Bytes of a layer's section that are read in every step where it is streamed: of a mixture whose experts
    are read when they are chosen, what lies before them."""
    section, experts = source.file.layer(layer), source.spec.expert_names(layer)
    if not residency.expert_slots or not experts:
        return section.size
    return padded(section.tensors[experts[0]] - section.offset, SECTION)


def _streamed(source: MappedWeights, residency: ResidencyPlan) -> Iterator[int]:
    yield from (_read_bytes(source, residency, layer) for layer in residency.streamed_layers)
    if residency.streamed_head:
        yield source.linear(_head_name(source.spec)).tiles.nbytes


def _head_name(spec: ModelSpec) -> str:
    return spec.embedding_name if spec.tied_embeddings else spec.head_name
