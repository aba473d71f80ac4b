"""A circuit breaker: after some failures in a row nothing is tried for a while, then one trial at a time.

::

    closed ──failures in a row──▶ open ──pause over──▶ trying ──success──▶ closed
                                    ▲                     │
                                    └──failure, or silence┘   each time with twice the pause, up to the longest

No I/O and no clock of its own: :meth:`Breaker.allows` before, one of the other two after.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

MOST_FAILURES = 3
"""Failures in a row that open it."""
FIRST_PAUSE = 0.1
LONGEST_PAUSE = 2.0


class Breaker:
    """Safe for threads."""

    def __init__(
        self,
        most_failures: int = MOST_FAILURES,
        clock: Callable[[], float] = time.monotonic,
        pause: float = FIRST_PAUSE,
    ) -> None:
        self._most_failures = most_failures
        self._clock = clock
        self._first_pause = pause
        self._lock = threading.Lock()
        self._failures = 0
        self._pause = 0.0
        self._until = 0.0

    @property
    def is_open(self) -> bool:
        """Whether only trials are let through."""
        return self._pause > 0

    def allows(self) -> bool:
        """Whether to try. While open, one caller after each pause is told to."""
        if not self._pause:
            return True
        with self._lock:
            now = self._clock()
            if self._pause and now < self._until:
                return False
            # The next one waits for this trial's outcome, or for another pause if it has none.
            self._until = now + self._pause
            return True

    def succeeded(self) -> None:
        """What was tried went well."""
        if self._failures or self._pause:
            with self._lock:
                self._failures = 0
                self._pause = 0.0

    def failed(self) -> None:
        """What was tried went wrong."""
        with self._lock:
            self._failures += 1
            if self._pause:
                self._pause = min(LONGEST_PAUSE, 2 * self._pause)
            elif self._failures >= self._most_failures:
                self._pause = self._first_pause
            else:
                return
            self._until = self._clock() + self._pause
