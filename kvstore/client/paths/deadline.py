"""Deadlines: the time that one call of a client may take, shared by everything that the call does."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvstore.errors import DeadlineError
from kvstore.host.cutting import check_going

_LOOK_SECONDS = 0.05
"""How often whoever waits for a lock looks whether it still should."""


def time_left(deadline: float) -> float:
    """Seconds until ``deadline`` (on the clock of ``time.monotonic``).

    Raises:
        DeadlineError: it has passed.
    """
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineError("the deadline passed before the work was done")
    return left


@contextmanager
def locked(lock: threading.Lock, deadline: float) -> Iterator[None]:
    """Hold a lock that others may keep while they wait for the node.

    Raises:
        DeadlineError: the lock was not to be had in time.
        UnavailableError: what this thread does was given up.
    """
    time_left(deadline)
    while not lock.acquire(timeout=max(0.0, min(_LOOK_SECONDS, deadline - time.monotonic()))):
        check_going()
        if time.monotonic() >= deadline:
            raise DeadlineError("the deadline passed while another thread waited for the node")
    try:
        yield
    finally:
        lock.release()
