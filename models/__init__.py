"""What is this model? `ModelSpec` from a config, one short file per family, and importers."""

from .config import spec_from_config, supported_model_types
from .open import open_source
from .source import ModelSource
from .spec import LinearSpec, ModelSpec, RopeSpec

__all__ = [
    "LinearSpec",
    "ModelSource",
    "ModelSpec",
    "RopeSpec",
    "open_source",
    "spec_from_config",
    "supported_model_types",
]
