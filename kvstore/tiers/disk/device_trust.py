"""How far the device is trusted: threads that may hang, deadlines, and when it is left alone."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from kvstore.breaker import Breaker, Failure, State
from kvstore.rare_lines import RareLines
from kvstore.segments.blockfile import Patience
from kvstore.segments.io_threads import IoThreads, LateError

_log = logging.getLogger(__name__)

READS_AT_ONCE = 4
FAILURES = 4
"""Failed calls in a row behind which the disk is left alone."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds for which it is."""
RESTING = "the disk keeps failing, and is left alone for a while"


class Direction:
    """Reads, or writes: the threads that do them, and whether to try at all.

    Args:
        threads: calls that go on at once.
        deadline: seconds that one may take.
        clock: seconds that only grow.
    """

    def __init__(self, threads: int, deadline: float, clock: Callable[[], float]) -> None:
        self._threads = IoThreads(threads)
        self._breaker = Breaker(FAILURES, FIRST_PAUSE, LONGEST_PAUSE, clock=clock)
        self.patience = Patience(self._threads, deadline)

    @property
    def resting(self) -> bool:
        """Whether a call now would be answered without trying. Who only asks this is no trial, and need not say how it
        went: the next write, or read, is."""
        return self._threads.all_hang or self._breaker.state is State.OPEN

    @property
    def failure(self) -> Failure | None:
        """Since when calls fail again and again, and how the last one did. None: they don't, as far as one knows."""
        if self._threads.all_hang:
            return Failure(self._breaker.since, "it does not answer")
        return self._breaker.failure

    @property
    def since(self) -> float:
        """Seconds since 1970 when they began to fail, or to go well."""
        return self._breaker.since

    def may_try(self) -> bool:
        """Whether to try an I/O now."""
        return not self._threads.all_hang and self._breaker.allows()

    def succeeded(self) -> None:
        """An I/O was done."""
        self._breaker.succeeded()

    def failed(self, error: OSError) -> None:
        """An I/O was refused; or late, as each further one would be."""
        self._breaker.failed(error.strerror or str(error), at_once=isinstance(error, LateError))

    def close(self) -> None:
        """Let the threads end."""
        self._threads.close()


class Device:
    """The disk in both directions, on threads apart, so that no write is late for the reads before it.

    Args:
        deadline: seconds that one call may take.
        clock: seconds that only grow.
    """

    def __init__(self, deadline: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.reading = Direction(READS_AT_ONCE, deadline, clock)
        self.writing = Direction(1, deadline, clock)
        self._lines = RareLines(clock=clock)

    def warn(self, line: str, *values: object) -> None:
        """Say in the log, not too often, what failed."""
        self._lines.say(_log.warning, line, *values)

    def close(self) -> None:
        """Let the threads end, each behind what it is doing."""
        self.reading.close()
        self.writing.close()
