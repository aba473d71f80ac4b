"""What others can write into a log: one line in a while from one place, whatever goes on failing, and no more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_MOST_TOLD = 100
"""Characters."""


class RareLines:
    """Lets one line through every so many seconds, and counts those that it holds back. Safe for threads.

    Args:
        seconds: from one line to the next.
        clock: seconds that only grow.
    """

    def __init__(self, seconds: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._next = -float("inf")
        self._held_back = 0

    def say(self, log: Callable[..., None], text: str, *values: object, count: bool = True) -> None:
        """Log the line, or hold it back.

        Args:
            log: a logger's method for one level.
            text: the line, with places for ``values``.
            values: as the logger takes them.
            count: whether the line says how many were held back before it.
        """
        with self._lock:
            now = self._clock()
            if now < self._next:
                self._held_back += 1
                return
            self._next = now + self._seconds
            held, self._held_back = self._held_back, 0
        if held and count:
            text, values = text + " (%d more such lines were held back)", (*values, held)
        log(text, *values, stacklevel=2)  # as the caller's line: logs may be limited by where a line comes from


def one_line(told: str) -> str:
    """What a client chose, such as a request's name, for a line of a log: it can neither end the line nor fill it."""
    return repr(told)[1:-1][:_MOST_TOLD]
