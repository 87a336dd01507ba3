"""A control group that limits a child's memory, where this system lets one be made."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def limited_memory(limit: int) -> Iterator[list[str] | None]:
    """Yields what comes before a command so that it and its children have `limit` bytes, page cache included;
    None where no control group can be made."""
    v1 = (ROOT / "memory").is_dir()
    group = (ROOT / "memory" if v1 else ROOT) / f"nybble-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        yield None
        return
    try:
        file = "memory.limit_in_bytes" if v1 else "memory.max"
        try:
            (group / file).write_text(str(limit))
            if v1 and (group / "memory.swappiness").exists():
                (group / "memory.swappiness").write_text("0")
        except OSError:
            yield None
            return
        yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
    finally:
        with contextlib.suppress(OSError):
            group.rmdir()
