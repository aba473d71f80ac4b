"""Prints tables on stdout: to a terminal as they fit there, into a pipe or a file each row as one line.

A table that is too wide for its terminal is folded, and loses nothing: each row becomes a line of its first words, with
its other cells below it, each behind the header of its column.

Names come from clients, and may hold anything: control characters in them never reach a terminal.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterator
from itertools import takewhile

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

_WIDEST = 4096
_GAP = 2
"""Between columns, and between cells that were folded."""
_LEAST_FOR_TEXT = 30
"""A column of text that would be narrower is no longer read easily."""


def shown(name: str) -> str:
    """A name as it is printed: control characters are replaced."""
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in name)


def figures_table(*columns: str, left: Collection[str] = ()) -> Table:
    """A table without a box and without rows.

    Args:
        columns: their headers. Figures stand at the right of their column.
        left: headers of columns that hold words.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", no_wrap=True)
    return table


def print_table(table: Table) -> None:
    """Print a table without a box. Columns of text are those with ``overflow="fold"``."""
    console = Console()
    if console.is_terminal:
        console.print(Fitted(table))
    else:
        print_wide(table)


def print_wide(what: RenderableType) -> None:
    """Print something where there is no terminal: however wide it is, a row is a line."""
    wide = Console(width=_WIDEST)
    with wide.capture() as captured:
        wide.print(what)
    for line in captured.get().splitlines():
        print(line.rstrip())


def print_line(line: str) -> None:
    """Print a line; on a terminal that is too narrow for it, several of whole words, indented behind the first."""
    width = terminal_width()
    print(line if width is None else textwrap.fill(line, width, subsequent_indent=" " * _GAP))


def terminal_width() -> int | None:
    """The columns of the terminal that stdout is; None: it is none."""
    console = Console()
    return console.width if console.is_terminal else None


class Fitted:
    """A table without a box as it fits into its terminal, however wide that is when it is drawn."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        columns = self._table.columns
        cells = [[_text(each, console) for each in column.cells] for column in columns]
        headers = [_text(column.header, console).plain if self._table.show_header else "" for column in columns]
        widths = [
            min(_width([Text(header), *column_cells]), _LEAST_FOR_TEXT if _is_text(column) else _WIDEST)
            for column, header, column_cells in zip(columns, headers, cells, strict=True)
        ]
        if sum(widths) + _GAP * (len(widths) - 1) <= options.max_width:
            yield self._table
            return
        first = max(1, len(list(takewhile(lambda each: each.justify == "left" and not _is_text(each), columns))))
        for row in zip(*cells, strict=True):
            yield Text(" " * _GAP).join(each for each in row[:first] if each)
            named = list(zip(columns, headers, row, strict=True))[first:]
            figures = [_named(header, cell) for column, header, cell in named if not _is_text(column)]
            texts = [_named(header, cell) for column, header, cell in named if _is_text(column)]
            for line in (*_lines(figures, options.max_width - _GAP), *texts):
                yield Padding(line, (0, 0, 0, _GAP), expand=False)


def _is_text(column: Column) -> bool:
    return column.overflow == "fold"


def _text(cell: RenderableType, console: Console) -> Text:
    return cell if isinstance(cell, Text) else console.render_str(str(cell))


def _width(cells: list[Text]) -> int:
    return max(cell_len(line) for each in cells for line in each.plain.split("\n"))


def _named(header: str, cell: Text) -> Text:
    return Text.assemble((f"{header} " if header else "", "bold"), cell)


def _lines(cells: list[Text], width: int) -> Iterator[Text]:
    """Cells side by side, as many on a line as fit."""
    line = Text()
    for each in cells:
        if line and line.cell_len + _GAP + each.cell_len > width:
            yield line
            line = Text()
        line = line + " " * _GAP + each if line else each
    if line:
        yield line
