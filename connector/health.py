"""Whether the node is worth asking."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

BACKOFF = 1.0
"""Seconds for which a node that failed is left alone."""

LOG_INTERVAL = 60.0
"""Seconds between two lines in the log about the same thing."""

_logger = logging.getLogger("kvstore.connector")


class NodeHealth:
    """What one kind of call last experienced.

    A node that is dead or hangs must cost the engine one failure a second, not one a request; and its user one line a
    minute, not one a request. After :data:`BACKOFF` the next call tries again: nothing needs a restart.

    Thread-safe.

    Args:
        what: what is asked of the node, for the log: ``"looking up"``.
        clock: seconds, monotonic.
    """

    def __init__(self, what: str, clock: Callable[[], float]) -> None:
        self._what = what
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._unreported = 0
        self._retry_at: float | None = None
        self._log_at: float | None = None

    @property
    def failures(self) -> int:
        """Calls that failed so far."""
        return self._failures

    def available(self) -> bool:
        """Whether to ask: False for :data:`BACKOFF` after a failure."""
        with self._lock:
            return self._retry_at is None or self._clock() >= self._retry_at

    def succeeded(self) -> None:
        """A call was answered."""
        with self._lock:
            self._retry_at = None

    def failed(self, error: Exception) -> None:
        """A call was not answered, or not in time."""
        with self._lock:
            now = self._clock()
            self._failures += 1
            self._unreported += 1
            self._retry_at = now + BACKOFF
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
