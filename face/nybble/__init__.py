"""Nybble: a quantized inference runtime for small machines."""

__version__ = "0.1.0"
