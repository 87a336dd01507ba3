"""onnx-ir, which the `onnx` and `cuda` extras install: the one place that imports it."""

from ..errors import MissingDependencyError

try:
    import onnx_ir as ir
except ImportError:
    raise MissingDependencyError(
        "ONNX files need onnx-ir; pip install 'nybble[onnx]', or 'nybble[cuda]' for a CUDA GPU"
    ) from None

__all__ = ["ir"]
