"""How much a client's stores have in hand at once: the node refuses what passes half of its arena."""

from __future__ import annotations

import threading
import time


class Room:
    """Lets stores in one after the other where the arena is too small for all of them. Safe for threads.

    Args:
        limit: bytes that they may have in hand together; a store that is larger is alone.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0
        self._changed = threading.Condition()

    @property
    def is_tight(self) -> bool:
        """Whether there is too little for as much again."""
        return 2 * self._taken > self._limit

    def take(self, size: int, deadline: float) -> None:
        """Wait for room, but not past the deadline: then the node decides."""
        with self._changed:
            if not self._fits(size):
                self._changed.wait_for(lambda: self._fits(size), max(0.0, deadline - time.monotonic()))
            self._taken += size

    def give_back(self, size: int) -> None:
        """What was taken is free again."""
        with self._changed:
            self._taken -= size
            self._changed.notify_all()

    def _fits(self, size: int) -> bool:
        return not self._taken or self._taken + size <= self._limit
