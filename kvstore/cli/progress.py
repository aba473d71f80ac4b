"""Progress of a long command in percent, on stderr, once it takes more than two seconds.

It is written by the thread that does the work: one that redraws it by itself would disturb what is measured.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

_QUIET_SECONDS = 2.0


class Progress:
    """One line that changes, on a terminal; elsewhere nothing, or a line for every ten percent.

    Args:
        what: what is being done, as ``kvstore bench eviction``.
        size: how many steps there are, unless :meth:`update` says so.
        show_size: how the size is written behind the percentage; None: it is not.
        lines: whether to write lines where stderr is no terminal.
    """

    def __init__(
        self, what: str, size: int = 0, *, show_size: Callable[[int], str] | None = None, lines: bool = False
    ) -> None:
        self._what, self._size, self._show_size = what, size, show_size
        self._terminal = sys.stderr.isatty()
        self._unit = 1 if self._terminal else 10 if lines else 0
        self._done = 0
        self._shown = -1
        self._start = time.monotonic()

    def advance(self, steps: int) -> None:
        """So many steps more are done."""
        self.update(self._done + steps, self._size)

    def update(self, done: int, size: int) -> None:
        """So many steps of so many are done."""
        self._done = done
        if not self._unit or time.monotonic() - self._start <= _QUIET_SECONDS:
            return
        percent = done * 100 // max(1, size) // self._unit * self._unit
        if percent <= self._shown:
            return
        self._shown = percent
        text = f"{self._what}: {percent} %"
        if self._show_size is not None:
            text += f" of {self._show_size(size)}"
        before, end = ("\r", "") if self._terminal else ("", "\n")
        print(f"{before}{text}", end=end, file=sys.stderr, flush=True)

    def end(self) -> None:
        """Leave the line."""
        if self._terminal and self._shown >= 0:
            print(file=sys.stderr)
