"""The event ring: the latest changes of what is in which tier. Bounded: who reads too slowly misses some, and is told.

Whoever changes a tier adds here under the lock of that tier, so changes of one page in one tier are in their order.
Nothing is remembered while nobody reads.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvstore.hashing import HASH_BYTES

MOST_PAGES = 1 << 16
"""Most pages in the changes that are remembered: 2 MiB of hashes, and at most 30 MB where each page came alone."""
EVENT_PAGES = 1024
"""Most pages in one event."""
_FINGERPRINT = slice(None, -HASH_BYTES)
_HASH = slice(-HASH_BYTES, None)


class Change(enum.Enum):
    """What happened to pages."""

    STORED = "stored"
    REMOVED = "removed"


class PageEvent(NamedTuple):
    """Something that happened to pages of one namespace, in one tier."""

    change: Change
    tier: str
    fingerprint: bytes
    hashes: tuple[bytes, ...]
    """Block hashes."""
    parent: bytes = b""
    """Of pages that came: block hash of the page before the first one, and each is the parent of the next. Empty: the
    first one is the head of its chain, or nobody knows; then the order means nothing."""


class EventRing:
    """Changes in the order in which they were added. Safe for threads."""

    def __init__(self, most_pages: int = MOST_PAGES) -> None:
        self._most_pages = most_pages
        self._changed = threading.Condition()
        self._events: dict[int, PageEvent] = {}  # by number, the oldest first
        self._next = 0
        self._pages = 0
        self._readers = 0

    @property
    def wanted(self) -> bool:
        """Whether anybody reads: else there is no need to say anything."""
        return self._readers > 0

    def stored(self, tier: str, pages: Iterable[tuple[bytes, bytes]]) -> None:
        """Pages came: the key of each, and the key of the page before it (empty where nobody says)."""
        if self.wanted:
            self._add(chains(tier, pages))

    def removed(self, tier: str, keys: Sequence[bytes]) -> None:
        """Pages left."""
        if self.wanted and keys:
            self._add(removals(tier, keys))

    def _add(self, events: Iterable[PageEvent]) -> None:
        with self._changed:
            for event in events:
                self._events[self._next] = event
                self._next += 1
                self._pages += len(event.hashes)
            while self._pages > self._most_pages:
                oldest = next(iter(self._events))
                self._pages -= len(self._events.pop(oldest).hashes)
            self._changed.notify_all()

    def reader(self) -> RingReader:
        """One more reader, of all that is added from now on. It must be closed."""
        with self._changed:
            self._readers += 1
            return RingReader(self, self._next)

    def wake(self) -> None:
        """Let readers that wait return with nothing."""
        with self._changed:
            self._changed.notify_all()

    @property
    def end(self) -> int:
        """The number of the next change."""
        return self._next

    def read(self, start: int, most_pages: int, timeout: float) -> tuple[list[PageEvent], int, int]:
        """Changes from a number on; waits for the first one.

        Returns:
            These, of ``most_pages`` pages or one event; the number behind them; and how many were forgotten before
            they could be read: none are returned then.
        """
        with self._changed:
            if start == self._next:
                self._changed.wait(timeout)
            oldest = next(iter(self._events), self._next)
            if start < oldest:
                return [], oldest, oldest - start
            events: list[PageEvent] = []
            while start < self._next and (not events or most_pages >= len(self._events[start].hashes)):
                events.append(self._events[start])
                most_pages -= len(self._events[start].hashes)
                start += 1
            return events, start, 0

    def close_reader(self) -> None:
        """One reader less; behind the last one, nothing is remembered."""
        with self._changed:
            self._readers -= 1
            if not self._readers:
                self._events.clear()
                self._pages = 0


class RingReader:
    """Somebody's place in the ring."""

    def __init__(self, ring: EventRing, start: int) -> None:
        self._ring = ring
        self._start = start

    def read(self, most_pages: int, timeout: float) -> tuple[list[PageEvent], int]:
        """What came since the last call, after a wait of at most ``timeout`` seconds: some of it, and how many events
        were lost since this reader was too slow."""
        events, self._start, lost = self._ring.read(self._start, most_pages, timeout)
        return events, lost

    def restart(self) -> None:
        """Go on with what is added from now on."""
        self._start = self._ring.end

    def close(self) -> None:
        """Read no more."""
        self._ring.close_reader()


def chains(tier: str, pages: Iterable[tuple[bytes, bytes]]) -> list[PageEvent]:
    """Pages that came (key and parent's key), as an event for each run in which every page is the next one's parent."""
    events: list[PageEvent] = []
    run: list[bytes] = []
    before = first_parent = b""
    for key, parent in pages:
        if run and (parent != before or len(run) == EVENT_PAGES):
            events.append(_stored(tier, before, run, first_parent))
            run = []
        if not run:
            first_parent = parent
        run.append(key[_HASH])
        before = key
    if run:
        events.append(_stored(tier, before, run, first_parent))
    return events


def _stored(tier: str, key: bytes, run: Sequence[bytes], parent: bytes) -> PageEvent:
    return PageEvent(Change.STORED, tier, key[_FINGERPRINT], tuple(run), parent[_HASH])


def removals(tier: str, keys: Sequence[bytes]) -> list[PageEvent]:
    """Pages that left, as events of one namespace each."""
    of: dict[bytes, list[bytes]] = {}
    for key in keys:
        of.setdefault(key[_FINGERPRINT], []).append(key[_HASH])
    return [
        PageEvent(Change.REMOVED, tier, fingerprint, tuple(hashes[at : at + EVENT_PAGES]))
        for fingerprint, hashes in of.items()
        for at in range(0, len(hashes), EVENT_PAGES)
    ]
