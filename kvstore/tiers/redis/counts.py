"""The tier's counters."""

from __future__ import annotations

import threading


class Counts:
    """The counters of :class:`~kvstore.tiers.tier.TierStatistics`, by name. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(
            (
                "asked",
                "hit",
                "missed",
                "corrupt",
                "errors",
                "stored",
                "refused",
                "evicted",
                "read_bytes",
                "written_bytes",
                "late",
            ),
            0,
        )

    def add(self, **counts: int) -> None:
        """Count some of them up."""
        with self._lock:
            for name, count in counts.items():
                self._counts[name] += count

    def all(self) -> dict[str, int]:
        """All of them, at one moment."""
        with self._lock:
            return dict(self._counts)
