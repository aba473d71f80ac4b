"""The in-memory index of a log, from page key to place: about 85 bytes a page, used in whole batches.

Python's own containers take five times that for a million pages. A page is a row of columns; a hash table of row
numbers, probed linearly, finds rows by key. Of a key, the namespace's fingerprint is kept once, the rest by page. Not
safe for threads: its owner has a lock.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.segments.fingerprints import Fingerprints
from kvstore.segments.record import BLOCK, FINGERPRINT_BYTES, KEY_BYTES, page_footprints

Rows = npt.NDArray[np.int64]
"""Row numbers; -1 where there is none."""
Ticks = npt.NDArray[np.uint64]
"""Times of use, see :meth:`PageIndex.touch`."""

_EMPTY, _DELETED = -1, -2
_HASH_BYTES = KEY_BYTES - FINGERPRINT_BYTES
_WORDS = _HASH_BYTES // 8
_WINDOW = np.arange(1, 9, dtype=np.uint32)
"""Places behind a key's home that are looked at at once."""
_FEW = 12  # up to here, a plain loop is faster than NumPy's overhead


class Place(NamedTuple):
    """Where a page's payload lies."""

    segment: int
    """The segment's id."""
    offset: int
    """In bytes from the start of the file; a multiple of ``BLOCK``, never 0."""
    length: int
    """Of the payload, in bytes, without padding."""
    checksum: int
    """xxh3_64 of the bytes on disk."""


class PageIndex:
    """A map from page keys (64 bytes) to places, with the tick of each page's last use.

    A row number stays a page's own until that page is removed.
    """

    def __init__(self) -> None:
        self._table = np.full(1 << 10, _EMPTY, np.int32)
        self._filled = 0  # of the table: rows and deleted ones
        self._used_rows = 0  # rows up to here hold a page or are in `_free`
        self._free = array("I")
        self._fingerprints = Fingerprints()
        self._namespaces = np.zeros(1 << 8, np.int32)  # their numbers
        self._block_hashes = np.zeros((1 << 8, _WORDS), np.uint64)  # what follows the fingerprint in the key
        self._hashes = np.zeros(1 << 8, np.uint32)
        self._segments = np.zeros(1 << 8, np.uint64)
        self._blocks = np.zeros(1 << 8, np.uint32)  # offsets in blocks; 0: the row is free
        self._lengths = np.zeros(1 << 8, np.uint32)
        self._checksums = np.zeros(1 << 8, np.uint64)
        self._ticks = np.zeros(1 << 8, np.uint64)
        self._read = np.zeros(1 << 8, np.bool_)

    def __len__(self) -> int:
        return self._used_rows - len(self._free)

    def find(self, keys: Sequence[bytes]) -> Rows:
        """The row of each key, -1 for those that are not here."""
        if len(keys) <= _FEW or set(map(len, keys)) != {KEY_BYTES}:
            return np.array([self._find(key) for key in keys], np.int64)
        hashes = _hashes(keys)
        mask = np.uint32(len(self._table) - 1)
        # Each looks for its hash, or for the end of the row of slots in which it would be: first at its home,
        rows = self._table.take(hashes & mask).astype(np.int64)
        ended = rows >= 0
        ended &= self._hashes.take(rows, mode="clip") == hashes
        ended |= rows == _EMPTY
        pending = (~ended).nonzero()[0]
        wanted = hashes[pending][:, None]
        slots = wanted + _WINDOW
        while len(pending):  # then behind it.
            candidates = self._table.take(slots & mask)
            stops = (self._hashes.take(candidates, mode="clip") == wanted) & (candidates >= 0) | (candidates == _EMPTY)
            first = stops.argmax(axis=1)
            lines = np.arange(len(pending))
            found = stops[lines, first]
            rows[pending[found]] = candidates[lines, first][found]
            pending, wanted, slots = pending[~found], wanted[~found], slots[~found] + np.uint32(len(_WINDOW))
        here = (rows >= 0).nonzero()[0]
        if len(here):
            chosen = [keys[at] for at in here.tolist()] if len(here) < len(keys) else keys
            same = (self._block_hashes[rows[here]] == _words(chosen)).all(axis=1)
            same &= self._namespaces[rows[here]] == self._fingerprints.of(chosen)
            for at in here[~same].tolist():  # another key of the same hash stood first
                rows[at] = self._find(keys[at])
        return rows

    def put(
        self,
        keys: Sequence[bytes],
        segments: npt.NDArray[np.uint64],
        offsets: npt.NDArray[np.uint64],
        lengths: npt.NDArray[np.uint32],
        checksums: npt.NDArray[np.uint64],
        tick: int,
        rows: Rows | None = None,
    ) -> Rows:
        """Note where pages lie now, and that they were used at ``tick``; they count as not read yet.

        Args:
            keys: no key twice.
            segments: their ids.
            offsets: of the payloads, in bytes from the start of the file.
            lengths: of the payloads, in bytes, without padding.
            checksums: xxh3_64 of the bytes on disk.
            tick: the clock of use, see :meth:`touch`.
            rows: what :meth:`find` answers for the keys, where that is known.

        Returns:
            Their rows.
        """
        if rows is None:
            rows = self.find(keys)
        new = np.flatnonzero(rows < 0)
        sizes = page_footprints(lengths)
        if len(new) < len(rows):
            known = np.flatnonzero(rows >= 0)
            growth = sizes[known] - page_footprints(self._lengths[rows[known]])
            self._fingerprints.change(self._namespaces[rows[known]], growth)
        if len(new):
            fresh = [keys[at] for at in new.tolist()]
            rows[new] = made = self._take_rows(len(new))
            self._namespaces[made] = self._fingerprints.add(fresh, sizes[new])
            self._block_hashes[made] = _words(fresh)
            self._hashes[made] = hashes = _hashes(fresh)
            if (self._filled + len(new)) * 3 > len(self._table) * 2:
                self._rebuild(made)
            else:
                self._enter(made, hashes)
        self._segments[rows] = segments
        self._blocks[rows] = offsets // np.uint64(BLOCK)
        self._lengths[rows] = lengths
        self._checksums[rows] = checksums
        self._ticks[rows] = tick
        self._read[rows] = False
        return rows

    def remove(self, rows: Rows) -> None:
        """Forget the pages in these rows, each named once."""
        mask = np.uint32(len(self._table) - 1)
        pending, slots = rows, self._hashes[rows] & mask
        while len(pending):
            here = self._table[slots] == pending
            self._table[slots[here]] = _DELETED
            pending, slots = pending[~here], (slots[~here] + np.uint32(1)) & mask
        self._fingerprints.remove(self._namespaces[rows], page_footprints(self._lengths[rows]))
        self._blocks[rows] = self._lengths[rows] = 0
        self._free.frombytes(rows.astype(np.uint32).tobytes())

    def places(self, rows: Rows) -> list[Place]:
        """Where the pages in these rows lie."""
        return [
            Place(segment, block * BLOCK, length, checksum)
            for segment, block, length, checksum in zip(
                self._segments[rows].tolist(),
                self._blocks[rows].tolist(),
                self._lengths[rows].tolist(),
                self._checksums[rows].tolist(),
                strict=True,
            )
        ]

    def keys(self, rows: Rows) -> list[bytes]:
        """The keys of the pages in these rows."""
        joined = self._block_hashes[rows].tobytes()
        names = self._fingerprints.names(self._namespaces[rows])
        return [name + joined[at * _HASH_BYTES : (at + 1) * _HASH_BYTES] for at, name in enumerate(names)]

    def all_rows(self) -> Rows:
        """The rows of all pages."""
        return np.flatnonzero(self._blocks[: self._used_rows])

    @property
    def end_of_rows(self) -> int:
        """No page has this row or one behind it."""
        return self._used_rows

    def rows_between(self, first: int, end: int) -> Rows:
        """The rows of the pages from one row to another."""
        return first + np.flatnonzero(self._blocks[first : min(end, self._used_rows)])

    def rows_with_prefix(self, prefix: bytes) -> Rows:
        """The rows of pages whose keys begin with ``prefix``."""
        rows = self.all_rows()
        if not prefix:
            return rows
        if len(prefix) > KEY_BYTES:
            return rows[:0]
        numbers = self._fingerprints.beginning_with(prefix[:FINGERPRINT_BYTES])
        rows = rows[np.isin(self._namespaces[rows], numbers)]
        if rest := prefix[FINGERPRINT_BYTES:]:
            begin = self._block_hashes[rows].view(np.uint8)[:, : len(rest)]
            whole: npt.NDArray[np.bool_] = (begin == np.frombuffer(rest, np.uint8)).all(axis=1)
            rows = rows[whole]
        return rows

    def fingerprints(self) -> list[bytes]:
        """The namespaces that have a page."""
        return self._fingerprints.all()

    def pages_of(self, fingerprint: bytes) -> int:
        """How many pages a namespace has."""
        return self._fingerprints.pages_of(fingerprint)

    def bytes_of(self, fingerprint: bytes) -> int:
        """Bytes on disk of a namespace's pages, with padding and records."""
        return self._fingerprints.bytes_of(fingerprint)

    def lengths(self, rows: Rows) -> npt.NDArray[np.uint32]:
        """Bytes of the payloads in these rows, on disk."""
        return self._lengths[rows]

    def footprints(self, rows: Rows) -> npt.NDArray[np.int64]:
        """Bytes on disk of the pages in these rows, with padding and records; 0 for a row that holds none."""
        return page_footprints(self._lengths[rows])

    def least_used(self, fingerprint: bytes, count: int) -> Rows:
        """At least so many of a namespace's pages, or all of them: those whose last use lies back furthest.

        The first to leave comes first. Of those that were used last at the same tick, the last that was written comes
        first: the tail of a prefix leaves before its head.
        """
        number = self._fingerprints.find(fingerprint)
        if number < 0:
            return np.empty(0, np.int64)
        end = self._used_rows
        rows = np.flatnonzero((self._namespaces[:end] == number) & (self._blocks[:end] != 0))
        ticks = self._ticks[rows]
        if count < len(rows):
            rows = rows[ticks <= np.partition(ticks, count - 1)[count - 1]]
        order = np.lexsort(
            (~self._blocks[rows], ~self._segments[rows], self._ticks[rows])
        )  # the complement: the last first
        return rows[order]

    def unused_since(self, rows: Rows, ticks: Ticks, fingerprint: bytes) -> Rows:
        """Of these rows, those that hold a page of a namespace whose last use was at the tick given for the row."""
        same: npt.NDArray[np.bool_] = self._namespaces[rows] == self._fingerprints.find(fingerprint)
        same &= (self._blocks[rows] != 0) & (self._ticks[rows] == ticks)
        return rows[same]

    def last_uses(self, rows: Rows) -> Ticks:
        """When the pages in these rows were used last."""
        return self._ticks[rows]

    def rows_in(self, segment: int) -> Rows:
        """The rows of pages that lie in this segment, by offset."""
        here = self._segments[: self._used_rows] == np.uint64(segment)
        here &= self._blocks[: self._used_rows] != 0
        rows = np.flatnonzero(here)
        return rows[np.argsort(self._blocks[rows], kind="stable")]

    def touch(self, rows: Rows, tick: int) -> None:
        """Note that pages were read at ``tick``, a clock of the caller's that only grows."""
        self._ticks[rows] = tick
        self._read[rows] = True

    def read_since(self, rows: Rows, tick: int) -> Rows:
        """Of these rows, those whose pages were read where they lie, at ``tick`` or later; the latest first."""
        wanted = rows[self._read[rows] & (self._ticks[rows] >= tick)]
        return wanted[np.argsort(-self._ticks[wanted].astype(np.int64), kind="stable")]

    def bytes_by_segment(self, segments: Sequence[int], since: int) -> tuple[list[int], list[int]]:
        """Bytes on disk of the pages in each segment, with padding: of all, and of those used at ``since`` or later.

        Args:
            segments: ids, ascending, all that any page lies in.
            since: a tick.
        """
        end = self._used_rows
        at = np.searchsorted(np.array(segments, np.uint64), self._segments[:end])  # rows that are free have no bytes
        size = -(-self._lengths[:end].astype(np.int64) // BLOCK) * BLOCK
        used = np.where(self._ticks[:end] >= since, size, 0)
        count = len(segments)
        return (
            np.bincount(at, size, count + 1)[:count].astype(np.int64).tolist(),
            np.bincount(at, used, count + 1)[:count].astype(np.int64).tolist(),
        )

    def _find(self, key: bytes) -> int:
        if len(key) != KEY_BYTES:
            return -1
        namespace = self._fingerprints.find(key[:FINGERPRINT_BYTES])
        if namespace < 0:
            return -1
        rest = key[FINGERPRINT_BYTES:]
        hashed = hash(key) & 0xFFFFFFFF
        slot = hashed & (len(self._table) - 1)
        while True:
            row = int(self._table[slot])
            if (
                row >= 0
                and self._hashes[row] == hashed
                and self._namespaces[row] == namespace
                and self._block_hashes[row].tobytes() == rest
            ):
                return row
            if row == _EMPTY:
                return -1
            slot = (slot + 1) & (len(self._table) - 1)

    def _take_rows(self, count: int) -> Rows:
        """Rows to fill, from those that were freed and from the end."""
        reused = min(count, len(self._free))
        rows = np.empty(count, np.int64)
        if reused:
            rows[:reused] = np.frombuffer(self._free[-reused:], np.uint32)
            del self._free[-reused:]
        end = self._used_rows + count - reused
        rows[reused:] = np.arange(self._used_rows, end)
        self._used_rows = end
        if end > len(self._hashes):
            capacity = end + end // 8
            for column in (self._hashes, self._segments, self._blocks, self._lengths, self._checksums):
                # In place: the system moves large memory without a copy, so that growing takes no second index.
                column.resize(capacity, refcheck=False)
            for other in (self._namespaces, self._ticks, self._read):
                other.resize(capacity, refcheck=False)
            self._block_hashes.resize((capacity, _WORDS), refcheck=False)
        return rows

    def _enter(self, rows: Rows, hashes: npt.NDArray[np.uint32]) -> None:
        """Put rows into the table, which has none of their keys."""
        mask = np.uint32(len(self._table) - 1)
        pending, slots = rows, hashes & mask
        while len(pending) > _FEW:
            was = self._table[slots]
            free = was < 0
            self._table[slots[free]] = pending[free]  # where two want one slot, the last one has it
            placed = self._table[slots] == pending
            self._filled += int((placed & (was == _EMPTY)).sum())
            pending, slots = pending[~placed], (slots[~placed] + np.uint32(1)) & mask
        last = len(self._table) - 1
        for row, slot in zip(pending.tolist(), slots.tolist(), strict=True):
            at = slot
            while (was_here := int(self._table[at])) >= 0:
                at = (at + 1) & last
            self._filled += was_here == _EMPTY
            self._table[at] = row

    def _rebuild(self, made: Rows) -> None:
        """A new table, without deleted ones, for the rows that hold a page and those that are being made."""
        rows = np.concatenate((self.all_rows(), made))
        capacity = len(self._table)
        while capacity < 2 * len(rows):
            capacity *= 2
        self._table = np.full(capacity, _EMPTY, np.int32)
        self._filled = 0
        self._enter(rows, self._hashes[rows])


def _words(keys: Sequence[bytes]) -> npt.NDArray[np.uint64]:
    """What follows the fingerprint in each key."""
    return np.frombuffer(b"".join(keys), np.uint64).reshape(len(keys), KEY_BYTES // 8)[:, -_WORDS:]


def _hashes(keys: Sequence[bytes]) -> npt.NDArray[np.uint32]:
    """Python's own hash: keyed anew in each process, so that nobody chooses keys which collide."""
    return np.fromiter(map(hash, keys), np.int64, len(keys)).astype(np.uint32)
