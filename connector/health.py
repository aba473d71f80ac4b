"""A circuit breaker for each kind of call to a node, and the line in the log that says that it failed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvstore.breaker import Breaker

BACKOFF = 1.0
"""Seconds for which a node that failed is left alone."""

LOG_INTERVAL = 60.0
"""Seconds between two lines in the log about the same thing."""

_logger = logging.getLogger("kvstore.connector")


class NodeHealth:
    """What one kind of call last experienced.

    A node that is dead or hangs must cost the engine one failure a second, not one a request; and its user one line a
    minute, not one a request. After :data:`BACKOFF` the next calls try again: nothing needs a restart.

    Thread-safe.

    Args:
        what: what is asked of the node, for the log: ``"looking up"``.
        clock: seconds, monotonic.
    """

    def __init__(self, what: str, clock: Callable[[], float]) -> None:
        self._what = what
        self._clock = clock
        self._breaker = breaker = Breaker(1, BACKOFF, BACKOFF, single_trial=False, clock=clock)
        self.available = breaker.allows
        """Whether to ask: False for :data:`BACKOFF` after a failure. Who asks this need not call."""
        self.succeeded = breaker.succeeded
        """A call was answered."""
        self._lock = threading.Lock()
        self._failures = 0
        self._unreported = 0
        self._log_at: float | None = None

    @property
    def failures(self) -> int:
        """Calls that failed so far."""
        return self._failures

    def failed(self, error: Exception) -> None:
        """A call was not answered, or not in time."""
        self._breaker.failed()
        with self._lock:
            now = self._clock()
            self._failures += 1
            self._unreported += 1
            if self._log_at is not None and now < self._log_at:
                return
            self._log_at = now + LOG_INTERVAL
            count, self._unreported = self._unreported, 0
        _logger.warning(
            "%s in kvstore failed (%d times since this was last said); the engine computes instead: %s: %s",
            self._what,
            count,
            type(error).__name__,
            error,
        )
