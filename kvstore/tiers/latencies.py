"""Latency histograms of calls on the lower tiers, by tier and operation."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

BOUNDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
"""Upper bounds of the buckets in seconds; one more bucket has the rest."""


class Latencies(NamedTuple):
    """Calls of one kind."""

    tier: str
    operation: str
    """``read``, ``write`` or ``lookup``, of one batch of pages."""
    counts: tuple[int, ...]
    """Calls in each bucket."""
    seconds: float
    """Of all of them."""


class TierLatencies:
    """Measures calls. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str], list[int]] = {}
        self._seconds: dict[tuple[str, str], float] = {}

    @contextmanager
    def measured(self, tier: str, operation: str) -> Iterator[None]:
        """Measure what is done inside, whatever becomes of it."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._add((tier, operation), time.perf_counter() - started)

    def all(self) -> list[Latencies]:
        """What was measured so far."""
        with self._lock:
            return [Latencies(*key, tuple(counts), self._seconds[key]) for key, counts in self._counts.items()]

    def _add(self, key: tuple[str, str], seconds: float) -> None:
        with self._lock:
            if key not in self._counts:
                self._counts[key] = [0] * (len(BOUNDS) + 1)
                self._seconds[key] = 0.0
            self._counts[key][bisect_left(BOUNDS, seconds)] += 1
            self._seconds[key] += seconds
