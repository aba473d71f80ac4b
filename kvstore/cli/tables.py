"""Prints tables on stdout, as wide as the terminal; into a pipe or a file, each row as one line.

Names come from clients, and may hold anything: control characters in them never reach a terminal.
"""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

_WIDEST = 4096


def shown(name: str) -> str:
    """A name as it is printed: control characters are replaced."""
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in name)


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
