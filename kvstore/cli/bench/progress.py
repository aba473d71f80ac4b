"""How far a long command is, on stderr of a terminal only, once it takes more than two seconds."""

from __future__ import annotations

import sys
import time

_QUIET_SECONDS = 2.0


class Progress:
    """A line that counts up.

    Args:
        what: what is being done, as ``kvstore bench eviction``.
        size: how many steps there are.
    """

    def __init__(self, what: str, size: int) -> None:
        self._what = what
        self._size = max(1, size)
        self._done = 0
        self._shown = -1
        self._start = time.monotonic()
        self._terminal = sys.stderr.isatty()

    def advance(self, steps: int) -> None:
        """So many steps more are done."""
        self._done += steps
        percent = self._done * 100 // self._size
        if self._terminal and percent > self._shown and time.monotonic() - self._start > _QUIET_SECONDS:
            self._shown = percent
            print(f"\r{self._what}: {percent} %", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Leave the line."""
        if self._shown >= 0:
            print(file=sys.stderr)
