"""When a disk that keeps failing is left alone, and when it is tried again. Decisions only, no I/O."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_FAILURES = 4
"""So many in a row, and the disk is set aside."""
_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 60.0
_LOG_SECONDS = 10.0


class Health:
    """A circuit breaker for one direction, reads or writes. Safe for threads.

    After a few failures in a row nothing is tried for a second; then one call is let through. When it fails, too, the
    pause doubles, up to a minute; when it succeeds, all is well.

    Args:
        clock: seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._pause = _FIRST_PAUSE
        self._until: float | None = None

    @property
    def resting(self) -> bool:
        """Whether a call now would be answered without trying."""
        until = self._until
        return until is not None and self._clock() < until

    def allows(self) -> bool:
        """Whether to try now. True while set aside: this call is the trial, and says how it went."""
        with self._lock:
            if self._until is None:
                return True
            now = self._clock()
            if now < self._until:
                return False
            self._until = now + self._pause  # the next trial, should this one never end
            return True

    def succeeded(self) -> None:
        """An I/O was done."""
        if not self._failures and self._until is None:
            return
        with self._lock:
            self._failures = 0
            self._pause = _FIRST_PAUSE
            self._until = None

    def failed(self, *, at_once: bool = False) -> None:
        """The system refused an I/O, or was late.

        Args:
            at_once: set the disk aside now, as after a deadline: each further one would cost as long again.
        """
        with self._lock:
            self._failures += 1
            if self._until is not None:
                self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            elif self._failures < _FAILURES and not at_once:
                return
            self._until = self._clock() + self._pause


class RareLines:
    """Lets one line through every ten seconds, with the number of those that it held back."""

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
