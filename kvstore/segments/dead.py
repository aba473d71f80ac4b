"""Records that lie in segments but are no page any more: what a tombstone has to hide, and for how long."""

from __future__ import annotations


class DeadRecords:
    """For each key, the segments that hold a record of it which no longer counts. Kept in memory."""

    def __init__(self) -> None:
        self._segments: dict[bytes, set[int]] = {}
        self._keys: dict[int, set[bytes]] = {}

    def add(self, key: bytes, segment: int) -> None:
        """The record of this key in this segment does not count any more."""
        self._segments.setdefault(key, set()).add(segment)
        self._keys.setdefault(segment, set()).add(key)

    def __bool__(self) -> bool:
        return bool(self._segments)

    def older(self, key: bytes, than: int) -> bool:
        """Whether a segment older than this one holds a dead record of the key."""
        return any(segment < than for segment in self._segments.get(key, ()))

    def drop(self, segment: int) -> list[bytes]:
        """The segment's file is gone. Returns the keys that now have no dead record anywhere."""
        rid = []
        for key in self._keys.pop(segment, ()):
            holders = self._segments[key]
            holders.discard(segment)
            if not holders:
                del self._segments[key]
                rid.append(key)
        return rid
