"""Recent lookups of a client: whether the pages of a load were looked up before, and so are counted already."""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections import OrderedDict
from operator import attrgetter

from kvstore.hashing import HASH_BYTES

MOST_LOOKUPS = 4096
"""Most lookups that are remembered."""
MOST_BYTES = 4 << 20
"""Most bytes of hashes in them, unless it is one lookup."""
SEARCHED_BYTES = 1 << 15
"""Most bytes, of the latest ones, in which a page is searched that no load goes on with: that takes 10 µs."""
MOST_COMPARED = 256
"""Most lookups, of the latest ones that go on with the same page, in which a load's last page is looked for."""
_number = attrgetter("number")


class RecentLookups:
    """The last lookups. Safe for threads, decides without I/O.

    Each stands for one load of its pages: of a part of them, or of all in several batches one behind the other; of the
    latest ones, also from any page on that was not loaded yet. Whoever loads them again has not looked them up. Of
    lookups that begin alike (requests with one system prompt do), a load goes with one that has its last page, too.
    """

    def __init__(
        self, most_lookups: int = MOST_LOOKUPS, most_bytes: int = MOST_BYTES, searched_bytes: int = SEARCHED_BYTES
    ) -> None:
        self._most_lookups = most_lookups
        self._most_bytes = most_bytes
        self._searched_bytes = searched_bytes
        self._lookups: OrderedDict[int, _Lookup] = OrderedDict()
        """By number, the oldest first."""
        self._next: dict[tuple[bytes, bytes], list[_Lookup]] = {}
        """Those whose next page to load this is, by fingerprint and hash; the oldest first."""
        self._noted = 0
        self._bytes = 0
        self._is_whole = True
        self._lock = threading.Lock()

    def note(self, fingerprint: bytes, hashes: bytes) -> None:
        """A lookup of at least one page of a namespace; ``hashes`` are joined."""
        with self._lock:
            self._begin()
            self._noted += 1
            lookup = _Lookup(self._noted, fingerprint, hashes)
            self._lookups[lookup.number] = lookup
            self._bytes += len(hashes)
            self._list(lookup)
            while len(self._lookups) > self._most_lookups or (
                self._bytes > self._most_bytes and len(self._lookups) > 1
            ):
                oldest = next(iter(self._lookups.values()))
                self._unlist(oldest)
                self._forget(oldest)
            self._is_whole = True

    def load(self, fingerprint: bytes, hashes: bytes) -> int:
        """A load of pages whose joined hashes these are. Returns how many leading ones are those of a lookup."""
        if not self._lookups or not hashes:
            return 0
        with self._lock:
            self._begin()
            known = self._match(fingerprint, hashes)
            self._is_whole = True
            return known

    def _match(self, fingerprint: bytes, hashes: bytes) -> int:
        first = hashes[:HASH_BYTES]
        # The usual case: it goes on where a lookup begins, or its last load ended.
        if alike := self._next.get((fingerprint, first)):
            lookup = _that_has_all(alike, hashes)
            return self._take(lookup, lookup.taken, hashes)
        searched = 0
        for lookup in reversed(self._lookups.values()):
            searched += len(lookup.hashes)
            if searched > self._searched_bytes and lookup.number != self._noted:
                break
            if lookup.fingerprint == fingerprint and (at := lookup.find(first)) >= 0:
                return self._take(lookup, at, hashes)
        return 0

    def _begin(self) -> None:
        """A change. What an interrupt left half changed is forgotten."""
        if not self._is_whole:
            self._lookups.clear()
            self._next.clear()
            self._bytes = 0
        self._is_whole = False

    def _take(self, lookup: _Lookup, at: int, hashes: bytes) -> int:
        same = _common(lookup.hashes[at : at + len(hashes)], hashes)
        self._unlist(lookup)
        lookup.taken = at + same
        if lookup.taken == len(lookup.hashes):
            self._forget(lookup)
        else:
            self._list(lookup)
        return same // HASH_BYTES

    def _list(self, lookup: _Lookup) -> None:
        insort(self._next.setdefault(lookup.next, []), lookup, key=_number)

    def _unlist(self, lookup: _Lookup) -> None:
        alike = self._next[lookup.next]
        del alike[bisect_left(alike, lookup.number, key=_number)]
        if not alike:
            del self._next[lookup.next]

    def _forget(self, lookup: _Lookup) -> None:
        del self._lookups[lookup.number]
        self._bytes -= len(lookup.hashes)


class _Lookup:
    """``taken``: bytes of its hashes up to which pages were loaded. A later one has a higher ``number``."""

    __slots__ = ("fingerprint", "hashes", "number", "taken")

    def __init__(self, number: int, fingerprint: bytes, hashes: bytes) -> None:
        self.number = number
        self.fingerprint = fingerprint
        self.hashes = hashes
        self.taken = 0

    @property
    def next(self) -> tuple[bytes, bytes]:
        """The page behind those that were loaded."""
        return self.fingerprint, self.hashes[self.taken : self.taken + HASH_BYTES]

    def find(self, block_hash: bytes) -> int:
        """Where this page is, behind those that were loaded; -1: nowhere."""
        at = self.hashes.find(block_hash, self.taken)
        while at >= 0 and at % HASH_BYTES:
            at = self.hashes.find(block_hash, at + 1)
        return at


def _that_has_all(alike: list[_Lookup], hashes: bytes) -> _Lookup:
    """The latest of lookups that go on with a load's first page which has its last one, too; else the latest of all."""
    before, last = len(hashes) - HASH_BYTES, hashes[-HASH_BYTES:]
    for lookup in alike[: -MOST_COMPARED - 1 : -1]:
        if lookup.hashes.startswith(last, lookup.taken + before):
            return lookup
    return alike[-1]


def _common(one: bytes, other: bytes) -> int:
    """Bytes of the leading pages that two runs of hashes have in common."""
    if other.startswith(one):
        return len(one)
    return next(at for at in range(0, len(one), HASH_BYTES) if not other.startswith(one[at : at + HASH_BYTES], at))
