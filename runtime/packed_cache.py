"""Packed weights kept in a file, so that the next start maps them instead of packing again.

One file an artifact, for both halves. It lies in the artifact's `cache/` or, where that cannot be written, in
the user's cache folder (`$XDG_CACHE_HOME/nybble`, by default `~/.cache/nybble`) under the artifact's digest;
that of a model in another format always lies there.
`packed_file.py` is the format. A file is replaced and never written in place, so what is mapped does not
change.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ..devices.process import give_back_memory
from ..devices.residency import ResidencyPlan
from ..devices.user_files import cache_folder
from ..errors import ModelFormatError, OutputError
from ..export.artifact import CACHE_FOLDER
from ..export.atomic_file import new_file
from ..export.weights import LogicalWeights
from ..models.spec import ModelSpec
from .packed_file import MappedWeights, UnusableFile, form_of, read_packed, write_packed
from .packed_sources import remember
from .packed_weights import FreshlyPacked, PackedLinear, PackedSource, Packing, PackingSource

FILE_NAME = "packed.bin"

log = logging.getLogger("nybble")


def load_packed(
    folder: Path | None,
    digest: str,
    spec: ModelSpec,
    weights: Callable[[], LogicalWeights],
    residency: ResidencyPlan | None = None,
    model: Path | None = None,
) -> PackedSource:
    """A model's packed weights: mapped from its cache file, which is made first where none can be used;
    where none can be written either, packed as they are asked for.

    `folder` is the artifact, None for a model in another format, and `digest` tells it from others, in
    hexadecimal. `weights` opens its tensors, and is called only to pack. What `residency` streams is checked
    without becoming resident. `model` is the path that the model is at: what the user's cache folder holds of
    another that was there before is removed.
    Raises what reading those raises; whatever is wrong with a cache file is one line in the log.
    """
    files = cache_files(folder, digest)
    for file in files:
        try:
            found = open_packed(file, spec, digest, residency)
            _remember(model, digest, file)
            return found
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            log.info("%s: is not used: %s", file, error.strerror)
        except UnusableFile as error:
            log.log(error.level, "%s: is not used: %s", file, error)
    source = FreshlyPacked(weights())
    for file in files:
        try:
            if file.parent.parent != folder:
                file.parent.parent.mkdir(parents=True, exist_ok=True)
            found = build_packed(file, source, digest, residency)
            _remember(model, digest, file)
            return found
        except OSError as error:
            log.info("%s: packed weights cannot be kept: %s", file, error.strerror)
        except UnusableFile as error:
            log.warning("%s: packed weights cannot be kept: %s", file, error)
    return source


def _remember(model: Path | None, digest: str, file: Path) -> None:
    if model is not None and file.parent == cache_folder():
        remember(model, digest, file)


def pack_into_temporary(
    folder: Path, source: PackingSource, digest: str, residency: ResidencyPlan
) -> MappedWeights:
    """Packed weights in a file without a name in `folder`, which is gone with its last user: for weights that
    are streamed, so have to be in a file, where none is kept. Raises `OutputError`."""
    import tempfile  # brings in much that running does not need

    try:
        with tempfile.TemporaryFile(dir=folder) as output:
            write_packed(output, source, digest)
            output.flush()
            give_back_memory()
            return read_packed(output.fileno(), folder / FILE_NAME, source.spec, digest, residency)
    except OSError as error:
        raise OutputError(
            f"{folder}: packed weights cannot be written: {error.strerror}; memory_budget has them streamed "
            "from a file: name another scratch_folder, or give more memory"
        ) from error


def check_packed(folder: Path, digest: str, spec: ModelSpec, weights: Callable[[], LogicalWeights]) -> None:
    """Compares the cache files that a start would use with the artifact's tensors: a CRC-32 finds damage, and
    not a file that was made of other weights. Raises `ModelFormatError` naming the first tensor that differs.
    """
    for file in cache_files(folder, digest):
        try:
            found = open_packed(file, spec, digest)
        except (OSError, UnusableFile):
            continue
        expected = FreshlyPacked(weights())
        for name in spec.tensors():
            if name in spec.float_names:
                same = np.array_equal(found.vector(name), expected.vector(name))
            else:
                same = _same_linear(found.linear(name), expected.packing(name))
            if not same:
                raise ModelFormatError(f"{file}: {name} is not the artifact's; delete this file")


def _same_linear(found: PackedLinear, expected: Packing) -> bool:
    one, other = found.permutation, expected.permutation
    if form_of(found) != form_of(expected) or (one is None) != (other is None):
        return False
    if one is not None and other is not None and not np.array_equal(one, other):
        return False
    at = 0
    for piece in expected.pieces():
        if not np.array_equal(found.tiles[at : at + len(piece)], piece):
            return False
        at += len(piece)
    return True


def cache_files(folder: Path | None, digest: str) -> tuple[Path, ...]:
    """Where a model's packed weights are looked for and kept, best first."""
    files = [] if folder is None else [folder / CACHE_FOLDER / FILE_NAME]
    user = cache_folder()
    if user is not None:
        files.append(user / f"{digest}-{FILE_NAME}")
    return tuple(files)


def open_packed(
    file: Path, spec: ModelSpec, digest: str, residency: ResidencyPlan | None = None
) -> MappedWeights:
    """The weights in a cache file, all of it checked, also what `residency` streams. Raises `OSError`, and
    `UnusableFile` for a file that is damaged, of another artifact or of another version."""
    # Opening a pipe that someone put there must not wait for a writer.
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return read_packed(descriptor, file, spec, digest, residency)
    finally:
        os.close(descriptor)


def build_packed(
    file: Path, source: PackingSource, digest: str, residency: ResidencyPlan | None = None
) -> MappedWeights:
    """Writes a cache file, piece by piece, and maps it. It appears whole or not at all; of several writers
    the last one's stays. Raises `OSError` where it cannot be written, and what the source raises."""
    if file.parent.is_symlink():  # an artifact made elsewhere must not choose where to write
        raise OSError(0, f"{file.parent} is a symbolic link")
    file.parent.mkdir(exist_ok=True)
    with new_file(file) as output:
        write_packed(output, source, digest)
        output.flush()
        give_back_memory()
        return read_packed(output.fileno(), file, source.spec, digest, residency)
