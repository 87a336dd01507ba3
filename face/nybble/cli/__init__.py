"""The command line: `nybble quantize | run | chat | info | verify | devices`."""

from .main import main

__all__ = ["main"]
