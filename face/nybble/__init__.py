"""Nybble: a quantized inference runtime for small machines.

    from nybble import LLM, SamplingParams

    with LLM("smollm2-int4") as llm:
        print(llm.chat([{"role": "user", "content": "What is the capital of France?"}]).text)

Names are loaded when they are first used: `import nybble` brings in no room.
"""

from typing import TYPE_CHECKING

from .lazy_names import lazy_names

__version__ = "0.1.0"

_HOMES = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "TokenStream": "streams",
    "AsyncTokenStream": "async_streams",
    "SamplingParams": "runtime.sampling_params",
    "RequestOutput": "runtime.outputs",
    "CompletionOutput": "runtime.outputs",
    "Logprob": "runtime.outputs",
    "Piece": "runtime.outputs",
    "TextScore": "runtime.outputs",
    "Timings": "runtime.outputs",
    "quantize": "quantization",
    "NybbleError": "errors",
    "ModelFormatError": "errors",
    "UnsupportedModelError": "errors",
    "CalibrationError": "errors",
    "QuantizationError": "errors",
    "SettingError": "errors",
    "OutputError": "errors",
    "DoesNotFitError": "errors",
    "RequestError": "errors",
    "QueueFull": "errors",
    "MissingDependencyError": "errors",
    "ExecutorError": "errors",
}

if TYPE_CHECKING:
    from .async_llm import AsyncLLM
    from .async_streams import AsyncTokenStream
    from .errors import (
        CalibrationError,
        DoesNotFitError,
        ExecutorError,
        MissingDependencyError,
        ModelFormatError,
        NybbleError,
        OutputError,
        QuantizationError,
        QueueFull,
        RequestError,
        SettingError,
        UnsupportedModelError,
    )
    from .llm import LLM
    from .quantization import quantize
    from .runtime.outputs import CompletionOutput, Logprob, Piece, RequestOutput, TextScore, Timings
    from .runtime.sampling_params import SamplingParams
    from .streams import TokenStream

__all__ = [
    "LLM",
    "AsyncLLM",
    "AsyncTokenStream",
    "CalibrationError",
    "CompletionOutput",
    "DoesNotFitError",
    "ExecutorError",
    "Logprob",
    "MissingDependencyError",
    "ModelFormatError",
    "NybbleError",
    "OutputError",
    "Piece",
    "QuantizationError",
    "QueueFull",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "SettingError",
    "TextScore",
    "Timings",
    "TokenStream",
    "UnsupportedModelError",
    "__version__",
    "quantize",
]


__getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
