"""The counters of a lower tier, in memory that may outlive the process."""

from __future__ import annotations

import threading

from kvstore.arena.format import TIER_COUNTERS

_PLACES = {name: place for place, name in enumerate(TIER_COUNTERS)}
_MOST = (1 << 64) - 1


class TierCounts:
    """The counters of :class:`~kvstore.tiers.tier.TierStatistics`, by name. Safe for threads.

    Each is one aligned word of 64 bits, so that a process that is killed at any instruction leaves no half of a number.
    ``words`` are this tier's alone until :meth:`detach`, and are counted on from what they say; without them, counters
    begin at 0 and end with the process.
    """

    def __init__(self, words: memoryview | None = None) -> None:
        self._lock = threading.Lock()
        self._words = words if words is not None else _own(bytes(8 * len(TIER_COUNTERS)))

    def add(self, **counts: int) -> None:
        """Count some of them up."""
        with self._lock:
            words = self._words
            for name, count in counts.items():
                if count:
                    place = _PLACES[name]
                    words[place] = (words[place] + count) & _MOST

    def all(self) -> dict[str, int]:
        """All of them, at one moment."""
        with self._lock:
            return dict(zip(TIER_COUNTERS, self._words.tolist(), strict=True))

    def detach(self) -> None:
        """Leave the words to who opens the tier next: what is counted from now on is this process's alone."""
        with self._lock:
            words, self._words = self._words, _own(self._words.tobytes())
            words.release()


def _own(content: bytes) -> memoryview:
    return memoryview(bytearray(content)).cast("Q")
