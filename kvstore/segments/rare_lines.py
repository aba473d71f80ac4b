"""A limit on what a failing disk logs: one line every ten seconds, which says how many were held back before it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_LOG_SECONDS = 10.0


class RareLines:
    """Lets one line through every ten seconds, with the number of those that it held back. Safe for threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._next = -float("inf")
        self._held_back = 0

    def say(self, log: Callable[..., None], text: str, *values: object) -> None:
        """Log the line, or count it."""
        with self._lock:
            now = self._clock()
            if now < self._next:
                self._held_back += 1
                return
            self._next = now + _LOG_SECONDS
            held, self._held_back = self._held_back, 0
        if held:
            text, values = text + " (%d more such lines were held back)", (*values, held)
        log(text, *values)
