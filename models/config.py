"""From a Hugging Face `config.json` to a `ModelSpec`, by `model_type`."""

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import UnsupportedModelError
from .config_reader import ConfigReader, shown
from .gemma2 import gemma2
from .gemma3 import gemma3_text
from .granite import granite
from .llama import llama, mistral
from .mixtral import mixtral
from .olmo2 import olmo2
from .phi3 import phi3
from .qwen2 import qwen2
from .qwen2_moe import qwen2_moe
from .qwen3 import qwen3
from .qwen3_moe import qwen3_moe
from .smollm3 import smollm3
from .spec import ModelSpec

# A new family is a file with one function, and a line here.
FAMILIES: Mapping[str, Callable[[ConfigReader], ModelSpec]] = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "granite": granite,
    "smollm3": smollm3,
    "olmo2": olmo2,
    "gemma2": gemma2,
    "gemma3_text": gemma3_text,
    "phi3": phi3,
    "mixtral": mixtral,
    "qwen2_moe": qwen2_moe,
    "qwen3_moe": qwen3_moe,
}


def supported_model_types() -> tuple[str, ...]:
    """The `model_type`s that `spec_from_config` knows."""
    return tuple(FAMILIES)


def spec_from_config(config: Mapping[str, Any], where: str) -> ModelSpec:
    """The spec that a parsed `config.json` describes, as transformers' class for its `model_type` would
    compute it. `where` names the file in messages.

    Raises `ModelFormatError` for a missing key or a value out of range, `UnsupportedModelError` for another
    `model_type` or a feature that is not supported.
    """
    reader = ConfigReader(config, where)
    model_type = reader.string("model_type")
    family = FAMILIES.get(model_type)
    if family is None:
        raise UnsupportedModelError(
            f"{where}: model_type {shown(model_type)} is not supported; supported: {', '.join(FAMILIES)}"
        )
    return family(reader)
