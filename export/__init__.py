"""How is a quantized model written down, and read back?"""

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
