"""How much a client's stores have in hand at once: the node refuses what passes half of its arena."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Room:
    """Lets stores in one after the other where the arena is too small for all of them. Safe for threads.

    Args:
        limit: bytes that they may have in hand together; a store that is larger is alone.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, size: int, deadline: float) -> Iterator[Callable[[], bool]]:
        """Wait for room, but not past the deadline: then the node decides. Yields a function that says whether there is
        too little for as much again."""
        with self._changed:
            self._changed.wait_for(
                lambda: not self._taken or self._taken + size <= self._limit, max(0.0, deadline - time.monotonic())
            )
            self._taken += size
        try:
            yield lambda: 2 * self._taken > self._limit
        finally:
            with self._changed:
                self._taken -= size
                self._changed.notify_all()
