"""Tables and JSON on standard output."""

import json
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
