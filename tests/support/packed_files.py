"""Files of packed weights: mapped, compared with weights packed afresh, and given other preambles."""

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from decoders import Weights

from nybble.export.weights import LogicalWeights
from nybble.runtime.packed_cache import load_packed
from nybble.runtime.packed_file import MappedWeights
from nybble.runtime.packed_weights import FreshlyPacked, PackedSource

DIGEST = "ab" * 32
PREAMBLE = struct.Struct("=8sII32sQII")  # then its CRC-32


class NoWeights:
    """Weights that must not be read."""

    def __call__(self) -> LogicalWeights:
        raise AssertionError("the artifact's weights were opened")


def mapped(folder: Path, weights: Weights) -> MappedWeights:
    """From the file that is there."""
    source = load_packed(folder, DIGEST, weights.spec, NoWeights())
    assert isinstance(source, MappedWeights)
    return source


def assert_same(found: PackedSource, weights: Weights) -> None:
    """Every tensor, bit for bit."""
    expected = FreshlyPacked(weights)
    for name in weights.spec.tensors():
        if name in weights.spec.float_names:
            assert np.array_equal(found.vector(name), expected.vector(name))
            continue
        one, other = found.linear(name), expected.linear(name)
        for field in ("tiles", "rows", "columns", "bits", "kind", "slices_per_group"):
            assert np.array_equal(getattr(one, field), getattr(other, field)), (name, field)
        assert (one.permutation is None) == (other.permutation is None)
        assert other.permutation is None or np.array_equal(one.permutation, other.permutation)


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def with_preamble(content: bytes, **changes: Any) -> bytes:
    """`content` with another preamble and the right CRC-32 of it."""
    fields = ("magic", "format", "layout", "digest", "offset", "size", "crc")
    values = dict(zip(fields, PREAMBLE.unpack_from(content), strict=True)) | changes
    head = PREAMBLE.pack(*values.values())
    return head + struct.pack("=I", zlib.crc32(head)) + content[PREAMBLE.size + 4 :]
