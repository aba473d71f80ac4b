"""What one object has moved, counted by whichever threads move it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

from kvstore.client.paths.results import NamespaceStatistics, StoreResult
from kvstore.host.forking import tell_children


class Tally:
    """Pages that one namespace's user stored and loaded. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loaded: Counter[str] = Counter()
        self._moved = StoreResult()
        tell_children(self)

    def stored(self, result: StoreResult) -> None:
        """Count a store."""
        with self._lock:
            self._moved += result

    def loaded(self, tiers: Sequence[str]) -> None:
        """Count the pages of a load, by the tiers that they came from."""
        with self._lock:
            self._loaded.update(tiers)

    def statistics(self) -> NamespaceStatistics:
        """Everything so far."""
        with self._lock:
            moved = self._moved
            return NamespaceStatistics(dict(self._loaded), moved.stored, moved.present, moved.refused)

    def forked(self) -> None:
        """In a child: nobody who held the lock will let it go."""
        self._lock = threading.Lock()
