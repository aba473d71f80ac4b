"""The pages of one log: where each lies, and what changes with it when it comes or goes. No I/O; the caller holds the
catalog's lock."""

from __future__ import annotations

import threading
from collections.abc import Container, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.events.ring import EventRing
from kvstore.segments import record
from kvstore.segments.index import PageIndex, Place, Rows
from kvstore.segments.segment import Segment
from kvstore.tiers.disk.tombstones import Tombstones
from kvstore.tiers.tier import KEY_BYTES, PageWrite
from kvstore.tiers.told_keys import ToldKeys

TIER = "disk"
PAGES_A_STEP = 1 << 10
"""Most pages listed, or removed, under one hold of the lock."""


class Asked(NamedTuple):
    """A page that is here, of a call that reads."""

    position: int
    """In the call."""
    row: int
    """In the index."""
    place: Place


class LogPages:
    """An index of pages over segments, and what follows it: tombstones, events, who is told.

    Args:
        lock: the catalog's.
    """

    def __init__(self, lock: threading.Lock) -> None:
        self.index = PageIndex()
        self.tombstones = Tombstones()
        self.told = ToldKeys(lock, PAGES_A_STEP)
        self.events = EventRing()  # nobody reads this one
        self.unreadable: set[bytes] = set()
        """In the index, but the last read was refused: a new write is taken."""

    def find(self, keys: Sequence[bytes]) -> list[Asked]:
        """Those of the pages that are here."""
        rows = self.index.find(keys)
        here = np.flatnonzero(rows >= 0)
        places = self.index.places(rows[here])
        return [Asked(*each) for each in zip(here.tolist(), rows[here].tolist(), places, strict=True)]

    def place_of(self, key: bytes) -> Place | None:
        """Where a page lies; None: it is not here."""
        rows = self.index.find([key])
        return self.index.places(rows)[0] if rows[0] >= 0 else None

    def placed(self, rows: Rows) -> list[tuple[Place, bytes]]:
        """Place and key of the pages in these rows."""
        return list(zip(self.index.places(rows), self.index.keys(rows), strict=True))

    def replay(self, segment: Segment, records: npt.NDArray[np.void], tick: int) -> None:
        """Take in the records of one segment, the oldest segment first.

        Args:
            segment: is told its tombstones, and whether its pages are encrypted.
            records: in the order in which they were written (``record.RECORDS``).
            tick: at which they count as used.
        """
        joined = records["key"].tobytes()
        keys = [joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES)]
        is_tombstone = records["codec"] == record.TOMBSTONE
        segment.encrypted = segment.encrypted or bool((records["codec"] == record.AES_GCM).any())
        if not is_tombstone.any() and len(set(keys)) == len(keys):
            self.put(segment.id, keys, records, tick)
            return
        for at, key in enumerate(keys):  # in order: a page may come, go and come again
            if is_tombstone[at]:
                segment.add_tombstones([key])
                self.forget([key], pending=False)
            else:
                self.put(segment.id, [key], records[at : at + 1], tick)

    def put(self, segment: int, keys: Sequence[bytes], records: npt.NDArray[np.void], tick: int) -> None:
        """Pages, none twice, lie in a segment now."""
        rows = self._supersede(keys)
        new = rows < 0
        ids = np.full(len(keys), segment, np.uint64)
        rows = self.index.put(keys, ids, records["offset"], records["length"], records["checksum"], tick, rows)
        self.told.came(rows, keys, new)

    def publish_stored(self, pages: Sequence[PageWrite], written: Container[bytes]) -> None:
        """Add to ``events`` which of the pages that a call wrote are here now."""
        rows = self.index.find([page.key for page in pages]).tolist()
        here = [page for page, row in zip(pages, rows, strict=True) if row >= 0 and page.key in written]
        self.events.stored(TIER, [(page.key, page.parent) for page in here])

    def forget(self, keys: Sequence[bytes], *, pending: bool = True) -> None:
        """Take pages out of the index; their records stay in the log, to be hidden by tombstones."""
        rows = self._supersede(keys)
        here = [key for key, row in zip(keys, rows.tolist(), strict=True) if row >= 0]
        self.take_out(rows[rows >= 0], here)
        if pending:
            self.tombstones.want(keys)

    def take_out(self, rows: Rows, keys: Sequence[bytes]) -> None:
        """These pages, which are in these rows, are here no more."""
        self.index.remove(rows)
        self.told.left(rows, keys)
        self.unreadable.difference_update(keys)
        self.events.removed(TIER, keys)

    def hidden_by(self, segment: Segment) -> list[bytes]:
        """The keys that a segment's tombstones hide now; a page in another segment hides the rest of a key, too."""
        tombstones = list(dict.fromkeys(segment.tombstones))
        rows = self.index.find(tombstones).tolist()
        return [key for key, row in zip(tombstones, rows, strict=True) if row < 0]

    def clear(self) -> None:
        """Forget all of them, and tell nobody any more."""
        self.index = PageIndex()
        self.told.end()

    def _supersede(self, keys: Sequence[bytes]) -> Rows:
        """The records of these pages, where they have any, are dead from now on. Returns the pages' rows."""
        rows = self.index.find(keys)
        known = np.flatnonzero(rows >= 0)
        if len(known):
            segments = [place.segment for place in self.index.places(rows[known])]
            self.tombstones.superseded([keys[at] for at in known.tolist()], segments)
        return rows
