"""The command line: `nybble quantize | run | chat | bench | info | verify | devices`."""

import signal
import sys

__all__ = ["main"]


def main(args: list[str] | None = None) -> None:
    """Entry point. Exit codes: 0 done, 1 failed with one line on standard error, 2 wrong usage, 130
    interrupted, also with one line."""
    try:
        from .commands import invoke  # takes long enough to be interrupted

        invoke(args)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the end has begun
        print("nybble: interrupted", file=sys.stderr)
        sys.exit(130)
