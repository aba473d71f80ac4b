"""What lookups found and hold until it is read: a table of leases, bounded, without I/O.

Between the call that asks for pages and the one that reads them the node may need their slots. So what was found is
leased, in parts as large as the engine's reads, and whoever reads takes its parts out by their first page.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvstore import PendingLoad


class FoundPart(NamedTuple):
    """Leading pages of what was asked for, leased."""

    hashes: tuple[bytes, ...]
    lease: PendingLoad
    nbytes: int
    until: float
    """When the node ends the lease by itself."""


class FoundPages:
    """Parts that were found and not read yet. Safe for threads.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._parts: dict[bytes, list[FoundPart]] = {}
        """By their first page; the same may have been found for several requests."""

    @property
    def held_bytes(self) -> int:
        """Bytes whose lease lasts."""
        now = self._clock()
        with self._lock:
            return sum(part.nbytes for parts in self._parts.values() for part in parts if part.until > now)

    def add(self, part: FoundPart) -> None:
        """A part was leased."""
        with self._lock:
            self._parts.setdefault(part.hashes[0], []).append(part)

    def take(self, hashes: Sequence[bytes]) -> FoundPart | None:
        """The part with the leading ones of these pages, as many as it has; it may have others behind them. The latest
        one, whose lease lasts longest; None: there is none whose lease lasts."""
        now = self._clock()
        with self._lock:
            parts = self._parts.get(hashes[0], []) if hashes else []
            for place in reversed(range(len(parts))):
                part = parts[place]
                common = min(len(part.hashes), len(hashes))
                if part.until > now and part.hashes[:common] == tuple(hashes[:common]):
                    del parts[place]
                    if not parts:
                        del self._parts[hashes[0]]
                    return part
        return None

    def take_late(self) -> FoundPart | None:
        """A part that nobody has read in time; None: there is none."""
        now = self._clock()
        with self._lock:
            for first, parts in self._parts.items():
                if parts[0].until <= now:  # the oldest one
                    part = parts.pop(0)
                    if not parts:
                        del self._parts[first]
                    return part
        return None
