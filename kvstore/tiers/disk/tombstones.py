"""Tombstones: which removed pages still need one in the log. No I/O; the caller holds the catalog's lock.

A page that is removed, or written again, leaves a *dead record* in its segment. As long as that file is there something
newer must hide it, or the page would come back when the log is opened: another record of the key, or a tombstone.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.segments.dead_records import DeadRecords


class Tombstones:
    """The dead records of one log, and the tombstones that are to be written."""

    def __init__(self) -> None:
        self._dead = DeadRecords()
        self._pending: set[bytes] = set()

    @property
    def pending(self) -> list[bytes]:
        """Keys that were removed, and whose tombstones are not written yet."""
        return list(self._pending)

    def still_pending(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those of the keys whose tombstones are still to be written."""
        return [key for key in keys if key in self._pending]

    def superseded(self, keys: Sequence[bytes], segments: Sequence[int]) -> None:
        """The record of each key in its segment is dead from now on."""
        self._dead.add(keys, segments)

    def want(self, keys: Sequence[bytes]) -> None:
        """These need tombstones."""
        self._pending.update(keys)

    def want_where_dead(self, keys: Sequence[bytes]) -> None:
        """So do those of these that have a dead record anywhere."""
        if keys and len(self._dead):
            dead = self._dead.anywhere(keys)
            self._pending.update(key for key, is_dead in zip(keys, dead, strict=True) if is_dead)

    def settled(self, keys: Sequence[bytes]) -> None:
        """A tombstone of each was written, or the page that comes after what it would have hidden."""
        self._pending.difference_update(keys)

    def needed(self, segment: int, hidden: list[bytes], pages: Sequence[bytes], *, behind_unread: bool) -> list[bytes]:
        """The keys that need a new tombstone when a segment is deleted: older segments hold dead records of them.

        Args:
            segment: that is to be deleted.
            hidden: keys that its own tombstones hide now.
            pages: the keys of the pages in it.
            behind_unread: whether an older one could not be read, of which nobody knows what it holds.
        """
        if behind_unread or not len(self._dead):
            return hidden if behind_unread else []
        keys = [*hidden, *pages]
        return [key for key, dead in zip(keys, self._dead.older(keys, segment), strict=True) if dead]

    def segment_deleted(self, segment: int) -> None:
        """A segment's file is gone: what it alone held needs no tombstone any more."""
        keys = list(self._pending)
        before = self._dead.anywhere(keys)
        self._dead.drop(segment)
        after = self._dead.anywhere(keys)
        self._pending.difference_update(
            key for key, was, is_dead in zip(keys, before, after, strict=True) if was and not is_dead
        )
