"""Recent lookups of a client: whether the pages of a load were looked up before, and so are counted already."""

from __future__ import annotations

import threading
from collections import deque

from kvstore.hashing import HASH_BYTES

MOST_LOOKUPS = 32
"""Most lookups that are remembered."""
MOST_BYTES = 1 << 20
"""Most bytes of hashes in them, unless it is one lookup."""
SEARCHED_BYTES = 1 << 15
"""Most bytes, of the latest ones, in which a page is searched that no load goes on with: that takes 10 µs."""


class RecentLookups:
    """The last lookups. Safe for threads, decides without I/O.

    Each stands for one load of its pages: of a part of them, or of all in several batches one behind the other; of the
    latest ones, also from any page on that was not loaded yet. Whoever loads them again has not looked them up.
    """

    def __init__(
        self, most_lookups: int = MOST_LOOKUPS, most_bytes: int = MOST_BYTES, searched_bytes: int = SEARCHED_BYTES
    ) -> None:
        self._most_lookups = most_lookups
        self._most_bytes = most_bytes
        self._searched_bytes = searched_bytes
        self._lookups: deque[_Lookup] = deque()
        """The latest first."""
        self._bytes = 0
        self._lock = threading.Lock()

    def note(self, fingerprint: bytes, hashes: bytes) -> None:
        """A lookup of at least one page of a namespace; ``hashes`` are joined."""
        with self._lock:
            self._lookups.appendleft(_Lookup(fingerprint, hashes))
            self._bytes += len(hashes)
            while len(self._lookups) > self._most_lookups or (
                self._bytes > self._most_bytes and len(self._lookups) > 1
            ):
                self._bytes -= len(self._lookups.pop().hashes)

    def load(self, fingerprint: bytes, hashes: bytes) -> int:
        """A load of pages whose joined hashes these are. Returns how many leading ones are those of a lookup."""
        if not self._lookups or not hashes:
            return 0
        first = hashes[:HASH_BYTES]
        with self._lock:
            for lookup in self._lookups:  # the usual case: it goes on where the lookup begins, or its last load ended
                if lookup.fingerprint == fingerprint and lookup.hashes.startswith(first, lookup.taken):
                    return self._take(lookup, lookup.taken, hashes)
            searched = 0
            for lookup in self._lookups:
                searched += len(lookup.hashes)
                if searched > self._searched_bytes and lookup is not self._lookups[0]:
                    break
                if lookup.fingerprint == fingerprint and (at := lookup.find(first)) >= 0:
                    return self._take(lookup, at, hashes)
        return 0

    def _take(self, lookup: _Lookup, at: int, hashes: bytes) -> int:
        same = _common(lookup.hashes[at : at + len(hashes)], hashes)
        lookup.taken = at + same
        if lookup.taken == len(lookup.hashes):
            self._lookups.remove(lookup)
            self._bytes -= len(lookup.hashes)
        return same // HASH_BYTES


class _Lookup:
    """``taken``: bytes of its hashes up to which pages were loaded."""

    __slots__ = ("fingerprint", "hashes", "taken")

    def __init__(self, fingerprint: bytes, hashes: bytes) -> None:
        self.fingerprint = fingerprint
        self.hashes = hashes
        self.taken = 0

    def find(self, block_hash: bytes) -> int:
        """Where this page is, behind those that were loaded; -1: nowhere."""
        at = self.hashes.find(block_hash, self.taken)
        while at >= 0 and at % HASH_BYTES:
            at = self.hashes.find(block_hash, at + 1)
        return at


def _common(one: bytes, other: bytes) -> int:
    """Bytes of the leading pages that two runs of hashes have in common."""
    if other.startswith(one):
        return len(one)
    return next(at for at in range(0, len(one), HASH_BYTES) if not other.startswith(one[at : at + HASH_BYTES], at))
