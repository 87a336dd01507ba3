"""What an importer gives: the spec, and tensors one at a time."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .spec import ModelSpec


class ModelSource(Protocol):
    """An opened model. Tensors are read from the file when asked for and never kept, so that a caller that
    goes layer by layer holds one layer."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def config(self) -> dict[str, Any]:
        """Hugging Face's `config.json`; reconstructed from the metadata for a GGUF."""
        ...

    @property
    def generation_config(self) -> dict[str, Any]:
        """Hugging Face's `generation_config.json`; at least the stop tokens."""
        ...

    @property
    def tokenizer_files(self) -> Mapping[str, bytes]:
        """File name to content: `tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja` where there
        is one."""
        ...

    @property
    def digest(self) -> str:
        """SHA-256 of the weights' files and the config, hexadecimal."""
        ...

    @property
    def origin(self) -> str:
        """What the user named, for messages and the manifest; never an absolute path."""
        ...

    def tensor(self, name: str) -> NDArray[np.float32]:
        """One tensor by its Hugging Face name, checked for shape and finite values. Raises
        `ModelFormatError`."""
        ...

    def close(self) -> None: ...
