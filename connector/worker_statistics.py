"""What the worker half counts: pages and bytes that moved, how long loads took, and which pages are stored now."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

LoadTiming = tuple[str, int, float]
"""Tier, pages, seconds."""

MOST_TIMINGS = 64
"""That are kept for whoever asks."""

MOST_STORED = 1024
"""Batches of stored pages that are kept for whoever asks."""


@dataclass(frozen=True, slots=True)
class WorkerStatistics:
    """Pages that were to move since the start, and what became of them."""

    pages_loaded: Mapping[str, int] = field(default_factory=dict)
    """By the tier they came from: ``"arena"``, ``"disk"``, ``"redis"``, ``"objects"``."""
    pages_not_loaded: int = 0
    """Gone, late, or not asked for because the node failed: load errors."""
    pages_stored: int = 0
    pages_present: int = 0
    """To be stored, but kvstore had them already."""
    pages_refused: int = 0
    """kvstore had no memory for them."""
    pages_dropped: int = 0
    """Given up: the queue was full, it was too late, their blocks were given away, or the node failed."""
    loads_late: int = 0
    """Loads given up at their deadline."""
    stores_late: int = 0
    load_failures: int = 0
    """Loads that the node, or the copy, ended with an error."""
    store_failures: int = 0
    bytes_loaded: int = 0
    bytes_stored: int = 0
    load_seconds: float = 0.0
    """Time that the load threads were busy, waiting for the node included."""
    store_seconds: float = 0.0


class WorkerCounters:
    """Counts since the start, from the worker's thread and those of its transfer queues. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._seconds = {"load": 0.0, "store": 0.0}
        self._loaded_by_tier: Counter[str] = Counter()
        self._timings: deque[LoadTiming] = deque(maxlen=MOST_TIMINGS)
        self._stored: deque[tuple[int, tuple[bytes, ...]]] = deque(maxlen=MOST_STORED)

    def add(self, **counts: int) -> None:
        """To fields of :class:`WorkerStatistics`."""
        with self._lock:
            self._counts.update(counts)

    def add_seconds(self, what: str, seconds: float) -> None:
        """A thread was busy with ``"load"`` or ``"store"``."""
        with self._lock:
            self._seconds[what] += seconds

    def add_loaded(self, tiers: Sequence[str], timing: LoadTiming | None) -> None:
        """Pages of these tiers were loaded together; how long that took, where they are all of one."""
        with self._lock:
            self._loaded_by_tier.update(tiers)
            if timing is not None:
                self._timings.append(timing)

    def add_stored(self, group: int, hashes: tuple[bytes, ...]) -> None:
        """These pages of a group are stored, or were before."""
        with self._lock:
            self._stored.append((group, hashes))

    def take_timings(self) -> list[LoadTiming]:
        """Since the last call."""
        with self._lock:
            timings = list(self._timings)
            self._timings.clear()
        return timings

    def take_stored(self) -> list[tuple[int, tuple[bytes, ...]]]:
        """Since the last call."""
        with self._lock:
            stored = list(self._stored)
            self._stored.clear()
        return stored

    def statistics(
        self, *, loads_late: int, stores_late: int, load_failures: int, store_failures: int
    ) -> WorkerStatistics:
        """All counts, with those that are kept elsewhere."""
        with self._lock:
            return WorkerStatistics(
                pages_loaded=dict(self._loaded_by_tier),
                **self._counts,
                loads_late=loads_late,
                stores_late=stores_late,
                load_failures=load_failures,
                store_failures=store_failures,
                load_seconds=self._seconds["load"],
                store_seconds=self._seconds["store"],
            )
