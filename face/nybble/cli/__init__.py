"""The command line: `nybble quantize | run | chat | bench | info | verify | devices`."""

from .main import main

__all__ = ["main"]
