"""Every error Nybble raises on purpose. A leaf: every room may import it.

A message is one line that names the file, tensor or setting, what was found, what was expected and,
where there is something to do, what to do.
"""


class NybbleError(Exception):
    """The family. The command line prints it as one line and exits with 1."""


class ModelFormatError(NybbleError):
    """A model, tokenizer or artifact file is missing, damaged or inconsistent."""


class UnsupportedModelError(NybbleError):
    """The file is sound, but describes something Nybble does not run."""


class CalibrationError(NybbleError):
    """The calibration text cannot be used: too short, not UTF-8, the wrong shape."""


class QuantizationError(NybbleError):
    """A tensor cannot be quantized as asked: not finite, or its Hessian cannot be factored."""


class SettingError(NybbleError, ValueError):
    """A setting or argument is out of its range, or two of them contradict each other."""


class OutputError(NybbleError):
    """The output cannot be written: it exists already, or the disk is full."""


class DoesNotFitError(NybbleError):
    """The model, its cache or the request needs more memory than the budget; carries the numbers."""


class RequestError(NybbleError, ValueError):
    """A request cannot be run: an empty prompt, or one longer than the context."""


class QueueFull(NybbleError):
    """The engine's waiting queue is at its bound."""


class DeadlineExceeded(NybbleError):
    """A request's deadline passed before it had ended."""


class MissingDependencyError(NybbleError, ImportError):
    """An optional dependency is needed; the message names the extra that installs it."""


class ExecutorError(NybbleError):
    """The executor failed inside a step, or was given arrays that break its contract."""


class AllocationError(ExecutorError):
    """Memory ran out in a step. The engine tries a smaller one before a request fails by it."""
