"""A check in a forked child."""

import os
from collections.abc import Callable


def in_child(check: Callable[[], bool]) -> int:
    """What a forked child ends with: 0 where `check` holds."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if check() else 1
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
