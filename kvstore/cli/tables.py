"""Prints tables on stdout, as wide as the terminal; into a pipe or a file, each row as one line.

Names come from clients, and may hold anything: control characters in them never reach a terminal.
"""

from __future__ import annotations

from collections.abc import Collection

from rich.console import Console
from rich.table import Table

_WIDEST = 4096


def shown(name: str) -> str:
    """A name as it is printed: control characters are replaced."""
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in name)


def figures_table(*columns: str, left: Collection[str] = (), no_wrap: bool = False) -> Table:
    """A table without a box and without rows.

    Args:
        columns: their headers. Figures stand at the right of their column.
        left: headers of columns that hold words.
        no_wrap: whether to cut what is too wide for a narrow terminal instead of wrapping it.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", no_wrap=no_wrap)
    return table


def print_table(table: Table) -> None:
    """Print a table without a box."""
    console = Console()
    if console.is_terminal:
        console.print(table)
        return
    wide = Console(width=_WIDEST)
    with wide.capture() as captured:
        wide.print(table)
    for line in captured.get().splitlines():
        print(line.rstrip())
