"""What can be run: an artifact folder, a GPTQ, AWQ or bitsandbytes checkpoint that somebody else made, or a
GGUF file, the latter two at their own bits."""

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from .errors import ModelFormatError, SettingError
from .export.artifact import Artifact, open_artifact
from .export.manifest import MANIFEST_NAME
from .models.hub_cache import located
from .models.open import ALIASES, open_source
from .models.spec import ModelSpec
from .quant.recipe import Recipe

if TYPE_CHECKING:
    from .devices import ExecutorKind, ResidencyPlan
    from .devices.memory_plan import Half
    from .export.foreign import ForeignCheckpoint
    from .export.manifest import Format
    from .export.weights import LogicalWeights
    from .models.gguf_source import GgufSource
    from .runtime.packed_weights import PackedSource


class Runnable(Protocol):
    """An opened model, none of whose weights has been read. To be closed once its executor is there."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def config(self) -> Mapping[str, Any]:
        """Hugging Face's `config.json`."""
        ...

    @property
    def generation_config(self) -> Mapping[str, Any]: ...

    @property
    def tokenizer_files(self) -> Mapping[str, bytes]: ...

    @property
    def half(self) -> "Half":
        """What the weights are read from."""
        ...

    @property
    def recipe(self) -> Recipe | None:
        """How all its linear layers were quantized; None where they differ."""
        ...

    @property
    def linear_bytes(self) -> tuple[int, ...] | None:
        """Bytes of each linear layer's tiles, in order; None where they follow from the recipe."""
        ...

    @property
    def digest(self) -> str:
        """Tells it from any other, hexadecimal."""
        ...

    def packed(self, cache: bool, residency: "ResidencyPlan", scratch: Path) -> "PackedSource":
        """The weights for `CpuExecutor`; with `cache` from a file of packed weights, which is made if need
        be. What `residency` streams comes from a file in any case, if need be a temporary one in the folder
        `scratch`."""
        ...

    def close(self) -> None: ...


def open_runnable(path: str | Path, format: str, executor: "ExecutorKind") -> Runnable:
    """Opens an artifact folder, a quantized checkpoint or a GGUF file, or one that the local Hugging Face
    cache has under this hub id; an alias is one where there is no such path. Raises `ModelFormatError`, and
    `SettingError` for what is no artifact with a format, or a GGUF file with another executor."""
    asked = path
    if str(path) not in ALIASES:
        path = located(path)
    if os.path.isfile(path):
        name: str | Path = Path(path)
    elif str(path) in ALIASES and not os.path.exists(path):
        name = str(path)
    elif Path(path).suffix == ".gguf" and not os.path.lexists(path):
        raise ModelFormatError(f"{path}: no such file")
    elif (checkpoint := _foreign(Path(path), format)) is not None:
        return checkpoint
    else:
        artifact = open_artifact(path, format)
        half = artifact.chosen(format, "gptq" if executor == "cpu" else "onnx")
        # Nothing is put into a folder that another library keeps.
        return RunnableArtifact(artifact, half, keeps_packed=path is asked)
    advice = f"make an artifact of it with `nybble quantize {path} -o OUT`"
    if executor != "cpu":
        raise SettingError(f"{path}: a GGUF file runs on executor 'cpu', not {executor!r}; {advice}")
    if format != "auto":
        raise SettingError(f"{path}: format is {format!r}, but a GGUF file has no halves; {advice}")
    from .models.gguf_source import GgufSource

    source = open_source(name)
    assert isinstance(source, GgufSource)  # folders were tried above
    return RunnableGguf(source, name if isinstance(name, Path) else None)


def _foreign(folder: Path, format: str) -> "RunnableCheckpoint | None":
    """A folder as a quantized checkpoint that somebody else made; None where it is none."""
    if Path(folder, MANIFEST_NAME).exists():
        return None
    from .export.foreign import ForeignCheckpoint, is_foreign

    if not is_foreign(folder):
        return None
    if format == "onnx":
        raise SettingError(f"{folder}: format is 'onnx', but the folder is a checkpoint without ONNX graphs")
    return RunnableCheckpoint(ForeignCheckpoint(folder), folder)


class RunnableArtifact:
    """An artifact, of which `half` is read. Its packed weights are kept in it, unless told not to: then in
    the user's cache folder."""

    linear_bytes = None

    def __init__(self, artifact: Artifact, half: "Format", keeps_packed: bool = True) -> None:
        self.artifact = artifact
        self._keeps_packed = keeps_packed
        self.half: Format = half
        self.spec = artifact.spec
        self.config = artifact.config
        self.generation_config = artifact.generation_config
        self.recipe = artifact.manifest.recipe
        self.digest = artifact.digest

    @property
    def tokenizer_files(self) -> Mapping[str, bytes]:
        return self.artifact.tokenizer_files

    def packed(self, cache: bool, residency: "ResidencyPlan", scratch: Path) -> "PackedSource":
        weights = partial(self.artifact.weights, self.half)
        folder = self.artifact.folder if self._keeps_packed else None
        path, digest = self.artifact.folder, self.digest
        return _packed(folder, path, digest, self.spec, weights, cache, residency, scratch)

    def close(self) -> None:
        pass


class RunnableCheckpoint:
    """A quantized Hugging Face folder. Its packed weights are kept in the user's cache folder."""

    half: "Half" = "gptq"

    def __init__(self, checkpoint: "ForeignCheckpoint", path: Path) -> None:
        self._checkpoint, self._path = checkpoint, path
        self.weights: LogicalWeights = checkpoint.weights
        self.recipe = checkpoint.recipe
        self.spec = checkpoint.spec
        self.config = checkpoint.config
        self.generation_config = checkpoint.generation_config
        self.digest = checkpoint.digest

    @property
    def tokenizer_files(self) -> Mapping[str, bytes]:
        return self._checkpoint.tokenizer_files

    @property
    def linear_bytes(self) -> tuple[int, ...]:
        from .runtime.packed_weights import Packing

        found = []
        for layer in range(self.spec.num_layers):
            for linear in self.spec.linears(layer):
                matrix = self.weights.matrix(linear.name)
                assert matrix is not None  # all linear layers are quantized, or rounded to 8 bits
                packing = Packing(matrix, f"tensor {linear.name}")
                order = packing.permutation
                found.append(packing.nbytes + (0 if order is None else order.nbytes))
        return tuple(found)

    def packed(self, cache: bool, residency: "ResidencyPlan", scratch: Path) -> "PackedSource":
        path, digest = self._path, self.digest
        return _packed(None, path, digest, self.spec, lambda: self.weights, cache, residency, scratch)

    def close(self) -> None:
        self._checkpoint.close()


class RunnableGguf:
    """A GGUF file. Its packed weights are kept in the user's cache folder."""

    half: "Half" = "gguf"
    recipe = None

    def __init__(self, source: "GgufSource", path: Path | None) -> None:
        self._source, self._path = source, path
        self.spec = source.spec
        self.config = source.config

    @property
    def generation_config(self) -> Mapping[str, Any]:
        return self._source.generation_config

    @property
    def tokenizer_files(self) -> Mapping[str, bytes]:
        return self._source.tokenizer_files

    @property
    def digest(self) -> str:
        return self._source.quick_digest

    @property
    def linear_bytes(self) -> tuple[int, ...]:
        from .export.gguf_weights import kept_type
        from .runtime.packed_weights import ggml_tiles_bytes

        return tuple(
            ggml_tiles_bytes(
                linear.out_features, linear.in_features, kept_type(self._source.type_of(linear.name))
            )
            for layer in range(self.spec.num_layers)
            for linear in self.spec.linears(layer)
        )

    def packed(self, cache: bool, residency: "ResidencyPlan", scratch: Path) -> "PackedSource":
        from .export.gguf_weights import GgufWeights

        weights = partial(GgufWeights, self._source)
        return _packed(None, self._path, self.digest, self.spec, weights, cache, residency, scratch)

    def close(self) -> None:
        self._source.close()


def _packed(
    folder: Path | None,
    path: Path | None,
    digest: str,
    spec: ModelSpec,
    weights: "Callable[[], LogicalWeights]",
    cache: bool,
    residency: "ResidencyPlan",
    scratch: Path,
) -> "PackedSource":
    from .runtime.packed_cache import load_packed, pack_into_temporary
    from .runtime.packed_weights import FreshlyPacked

    if cache:
        source = load_packed(folder, digest, spec, weights, residency, model=path)
    else:
        source = FreshlyPacked(weights())
    if residency.streams and isinstance(source, FreshlyPacked):
        return pack_into_temporary(scratch, source, digest, residency)
    return source
