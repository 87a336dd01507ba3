"""How is a quantized model written down, and read back?

Names are loaded when they are first used: running an artifact brings in nothing that writes one.
"""

from typing import TYPE_CHECKING

from ..lazy_names import lazy_names

if TYPE_CHECKING:
    from .artifact import Artifact, open_artifact
    from .artifact_writer import artifact_bytes, check_formats, check_onnx_contract, write_artifact
    from .atomic import check_output
    from .manifest import Manifest
    from .quality import write_quality
    from .verify import verify_files, verify_graphs, verify_integers

__all__ = [
    "Artifact",
    "Manifest",
    "artifact_bytes",
    "check_formats",
    "check_onnx_contract",
    "check_output",
    "open_artifact",
    "verify_files",
    "verify_graphs",
    "verify_integers",
    "write_artifact",
    "write_quality",
]

__getattr__ = lazy_names(
    __name__,
    {
        "Artifact": "artifact",
        "Manifest": "manifest",
        "artifact_bytes": "artifact_writer",
        "check_formats": "artifact_writer",
        "check_onnx_contract": "artifact_writer",
        "check_output": "atomic",
        "open_artifact": "artifact",
        "verify_files": "verify",
        "verify_graphs": "verify",
        "verify_integers": "verify",
        "write_artifact": "artifact_writer",
        "write_quality": "quality",
    },
)
