"""A circuit breaker: what failed several times in a row is left alone for a while, and then tried again.

=========  ========================  ===============================  ==========  ======================================
state      entered                   ``allows()``                     succeeded   failed
=========  ========================  ===============================  ==========  ======================================
closed     at first; by a success    True                             closed      open, by the last of ``failures`` in a
                                                                                  row; else closed
open       by a failure              False                            closed      open, for twice as long, up to a
                                                                                  longest pause
half-open  when the pause is over    True, and open for as long       closed      the same
                                     again (``single_trial``)
=========  ========================  ===============================  ==========  ======================================

It decides and does no I/O: :meth:`Breaker.allows` is asked before a call, and told by :meth:`Breaker.succeeded` or
:meth:`Breaker.failed` how it went. A trial that never tells is followed by the next one after another pause.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable
from typing import NamedTuple


class State(enum.Enum):
    """Of a breaker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Failure(NamedTuple):
    """What fails again and again."""

    since: float
    """Seconds since 1970."""
    why: str
    """Of the last time, in the words of who told of it."""


class Breaker:
    """One of these for each thing that fails by itself: a server, reads of a disk. Safe for threads.

    Args:
        failures: so many in a row open it.
        pause: seconds for which it is open, at first.
        longest_pause: seconds, to which that doubles by further failures while it is not closed.
        single_trial: half-open, it lets one caller through, and the others when that one has succeeded. False: it lets
            everybody through until one fails, for callers who may ask and then not call.
        clock: seconds that only grow.
        now: seconds since 1970.
    """

    def __init__(
        self,
        failures: int,
        pause: float,
        longest_pause: float,
        *,
        single_trial: bool = True,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._most_failures = failures
        self._first_pause = pause
        self._longest_pause = longest_pause
        self._single_trial = single_trial
        self._clock = clock
        self._now = now
        self.since = now()
        """Seconds since 1970: of the first failure in a row, or of the first success behind one."""
        self._why = ""
        self._lock = threading.Lock()
        self._failures = 0
        """In a row."""
        self._pause = 0.0
        """0: it is closed."""
        self._half_open_at = 0.0

    @property
    def state(self) -> State:
        """What it is now. Who only asks this is no trial."""
        if not self._pause:
            return State.CLOSED
        return State.OPEN if self._clock() < self._half_open_at else State.HALF_OPEN

    @property
    def failure(self) -> Failure | None:
        """What fails; None while it is closed."""
        return Failure(self.since, self._why) if self._pause else None

    def allows(self) -> bool:
        """Whether to call now. Half-open, True makes this caller the trial."""
        if not self._pause:
            return True
        with self._lock:
            now = self._clock()
            if self._pause and now < self._half_open_at:
                return False
            if self._single_trial:
                self._half_open_at = now + self._pause
            return True

    def succeeded(self) -> None:
        """A call went well."""
        if self._failures or self._pause:
            with self._lock:
                self._failures = 0
                self._pause = 0.0
                self.since = self._now()

    def failed(self, why: str = "", *, at_once: bool = False) -> None:
        """A call went wrong.

        Args:
            why: in words, for people.
            at_once: open it, whatever the number of failures: each further one would cost too much.
        """
        with self._lock:
            if not self._failures:
                self.since = self._now()
            self._failures += 1
            self._why = why
            if self._pause:
                self._pause = min(2 * self._pause, self._longest_pause)
            elif self._failures >= self._most_failures or at_once:
                self._pause = self._first_pause
            else:
                return
            self._half_open_at = self._clock() + self._pause

    def forked(self) -> None:
        """In a child: another thread of the parent may have had the lock."""
        self._lock = threading.Lock()
