"""Ghosts: pages that left, by the hash of their key, 8 bytes each; in a table that grows a few places at a time.

Linear hashing (W. Litwin, "Linear hashing: a new tool for file and table addressing", VLDB 1980): the table grows by
one bucket, which takes over what belongs into it from one other. So whoever holds a lock never waits for the whole
table. A bucket has eight places, newest first; what does not fit any more is forgotten.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

PLACES_A_PAGE = 16
"""So many pages that left are remembered for each that is here ..."""
MOST_BYTES = 128 << 20
"""... as long as they take no more than this: enough for 1,048,576 pages."""
PLACES_BEYOND = 8
"""Or, if that is more, so many for each that is here."""
GHOST_BYTES = 8

_WAYS = 8
_BITS = 6
"""Bits of the hash that say the bucket in the smallest table."""
_TAG_BITS, _STAMP_BITS, _CLASS_BITS = 32, 24, 8
_TAG = (1 << _TAG_BITS) - 1
_STAMP = (1 << _STAMP_BITS) - 1
_CLASS = (1 << _CLASS_BITS) - 1
_UNIT_BITS = 4
"""A time is kept in units of 16 references; after 2^28 references it begins again, and an age is taken too short."""
_SPLITS = 2
"""Buckets that a table grows by, at most, when a page is added."""
_EMPTY = bytes(GHOST_BYTES * _WAYS)


class Ghost(NamedTuple):
    """What is remembered of a page."""

    page_class: int
    """0 to 254."""
    age: int
    """References since it was used last."""


class Ghosts:
    """A set-associative table; a hash that is not in it is taken for one that is in less than 1 of 10,000 cases."""

    def __init__(self) -> None:
        self._records = array("Q")
        """Tag, stamp and class + 1; 0: nothing. The tag has the bits of the hash from ``_BITS`` on."""
        self._buckets = 0
        self._level = _BITS
        """The bits of the hash that say the bucket of those that were not split yet at this level."""
        self._grown_for = -1
        """The table is as large as it is to be with so many pages."""

    def __len__(self) -> int:
        """Places."""
        return len(self._records)

    def add(self, number: int, page_class: int, used: int, pages: int) -> None:
        """A page left, when there were so many pages; ``used``: its last use, in references."""
        if pages > self._grown_for:
            self._grow(pages)
        first = self._find(number) * _WAYS
        record = (number >> _BITS & _TAG) << 32 | (used >> _UNIT_BITS & _STAMP) << _CLASS_BITS | page_class + 1
        records = self._records
        records[first + 1 : first + _WAYS] = records[first : first + _WAYS - 1]
        records[first] = record

    def __contains__(self, number: int) -> bool:
        return self._place(number) >= 0

    def take(self, number: int, clock: int) -> Ghost | None:
        """A page is back: what was remembered of it, once."""
        place = self._place(number)
        if place < 0:
            return None
        records = self._records
        record = records[place]
        end = place - place % _WAYS + _WAYS
        records[place : end - 1] = records[place + 1 : end]
        records[end - 1] = 0
        age = ((clock >> _UNIT_BITS) - (record >> _CLASS_BITS)) & _STAMP
        return Ghost((record & _CLASS) - 1, age << _UNIT_BITS)

    def _place(self, number: int) -> int:
        if not self._buckets:
            return -1
        first = self._find(number) * _WAYS
        tag = number >> _BITS & _TAG
        for place, record in enumerate(self._records[first : first + _WAYS], first):
            if record >> 32 == tag and record:
                return place
        return -1

    def _find(self, number: int) -> int:
        """The bucket of a hash."""
        bucket = number & ((2 << self._level) - 1)
        return bucket if bucket < self._buckets else bucket & ((1 << self._level) - 1)

    def _grow(self, pages: int) -> None:
        places = places_for(pages)
        if not self._buckets:
            self._buckets = 1 << _BITS
            self._records.frombytes(_EMPTY * self._buckets)
        for _ in range(_SPLITS):
            if (self._buckets + 1) * _WAYS > places:
                self._grown_for = pages
                return
            self._split()

    def _split(self) -> None:
        """Add a bucket, for those of another one whose hashes have the next bit."""
        level, new = self._level, self._buckets
        old = new - (1 << level)
        bit = 1 << 32 + level - _BITS
        records = self._records[old * _WAYS : (old + 1) * _WAYS]
        stay = [record for record in records if not record & bit and record]
        move = [record for record in records if record & bit]
        for some in (stay, move):
            some.extend([0] * (_WAYS - len(some)))
        self._records[old * _WAYS : (old + 1) * _WAYS] = array("Q", stay)
        self._records.extend(move)
        self._buckets += 1
        if self._buckets == 2 << level:
            self._level += 1


def places_for(pages: int) -> int:
    """How many are to be remembered."""
    return max(min(PLACES_A_PAGE * pages, MOST_BYTES // GHOST_BYTES), PLACES_BEYOND * pages)
