"""Progress on standard error: a bar with the time left on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Report = Callable[[str, int, int], None]

PLAIN_INTERVAL_SECONDS = 10.0
COUNTED = 10_000  # from here on it is bytes, shown as a share


@contextmanager
def progress() -> Iterator[Report]:
    """Yields `report(stage, done, total)`, to be called as work proceeds."""
    if sys.stderr.isatty():
        with _bar() as report:
            yield report
    else:
        yield _plain()


@contextmanager
def _bar() -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description:<12}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        tasks: dict[str, int] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done, total=total)  # type: ignore[arg-type]

        yield report


def _plain() -> Report:
    started: dict[str, float] = {}
    printed: dict[str, float] = {}

    def report(stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        start = started.setdefault(stage, now)
        if done < total and now - printed.get(stage, float("-inf")) < PLAIN_INTERVAL_SECONDS:
            return
        printed[stage] = now
        left = f", {(now - start) / done * (total - done):.0f} s left" if 0 < done < total else ""
        amount = f"{done}/{total}" if total < COUNTED else f"{done * 100 // total} %"
        print(f"{stage}: {amount}{left}", file=sys.stderr, flush=True)

    return report
