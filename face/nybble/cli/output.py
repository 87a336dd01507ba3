"""Tables and JSON on standard output."""

import json
import sys
from collections.abc import Sequence
from typing import Any

import click


def print_json(data: Any) -> None:
    click.echo(json.dumps(data, indent=2, ensure_ascii=False))


def print_table(title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Label and value, without a frame: readable in a terminal, a pipe and a log."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=title, title_justify="left", title_style="bold", box=None, show_header=False, pad_edge=False
    )
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in rows:
        table.add_row(Text(label), Text(value))
    console = Console()
    console.print(table)
    console.print()


def print_columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns under a header, the first to the left and the others to the right."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, name in enumerate(header):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    # Without a terminal there is no width to keep to.
    console = Console(width=None if sys.stdout.isatty() else 1000)
    console.print(table)
    console.print()
