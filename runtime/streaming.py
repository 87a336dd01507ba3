"""What `CpuExecutor` tells its kernels of streamed weights: `kernels/weight_stream.h` reads them."""

from collections.abc import Iterator
from typing import Any

from ..devices.residency import ResidencyPlan
from ..errors import SettingError
from ..models.spec import ModelSpec
from .packed_file import MappedWeights
from .packed_weights import PackedSource

READ_TIMEOUT = 30.0  # seconds
MOST_SECONDS = 1e6


def check_residency(source: PackedSource, residency: ResidencyPlan, read_timeout: float) -> None:
    """Raises `SettingError` for a plan of another model, for one that streams from no file, and for a time
    that is none."""
    if residency.num_layers != source.spec.num_layers:
        raise SettingError(
            f"residency is for {residency.num_layers} layers; the model has {source.spec.num_layers}"
        )
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
    for layer in residency.streamed_layers:
        section = file.layer(layer)
        tiles = [section.tensors[linear.name] for linear in spec.linears(layer)]
        builder.stream_layer(layer, section.offset, section.size, tiles)
    if residency.streamed_head:
        tensors = file.ends.tensors
        builder.stream_head(tensors[spec.embedding_name], tensors[_head_name(spec)])
    return _kernels.StreamFile(
        file.descriptor, str(file.path), residency.buffers, buffer_bytes(source, residency), read_timeout
    )


def buffer_bytes(source: MappedWeights, residency: ResidencyPlan) -> int:
    """Bytes of each of the plan's buffers for this model."""
    layers = [section.size for section in source.file.sections[1:]]
    head = source.linear(_head_name(source.spec))
    return residency.buffer_bytes(layers, head.tile_bytes)


def streamed_bytes(source: MappedWeights, residency: ResidencyPlan) -> int:
    """Bytes of weights that a step with logits reads from the file."""
    return sum(_streamed(source, residency))


def _streamed(source: MappedWeights, residency: ResidencyPlan) -> Iterator[int]:
    yield from (source.file.layer(layer).size for layer in residency.streamed_layers)
    if residency.streamed_head:
        yield source.linear(_head_name(source.spec)).tiles.nbytes


def _head_name(spec: ModelSpec) -> str:
    return spec.embedding_name if spec.tied_embeddings else spec.head_name
