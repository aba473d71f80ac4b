"""The pages of all known packs: where each lies, and where else. No I/O; the caller holds the catalog's lock."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from kvstore.events.ring import EventRing
from kvstore.segments.index import PageIndex, Place, Rows
from kvstore.tiers.objects.known_packs import KnownPack, KnownPacks
from kvstore.tiers.objects.pack import Records
from kvstore.tiers.objects.planning import PackUse
from kvstore.tiers.tier import KEY_BYTES
from kvstore.tiers.told_keys import ToldKeys

TIER = "objects"
KEYS_AT_ONCE = 256
"""Changed under one hold of the lock, before lookups have their turn."""
_DROPPED_SHARE = 16
_PLACES = np.dtype([("segment", np.uint64), ("offset", np.uint64), ("length", np.uint32), ("checksum", np.uint64)])


class PackPages:
    """An index of pages over packs, which stand for segments. A page that lies in several is found in one of them, and
    in another once that is gone: it is at no moment nowhere.

    Args:
        packs: that are known.
        most_pages: that are remembered.
        lock: the catalog's.
    """

    def __init__(self, packs: KnownPacks, most_pages: int, lock: threading.Lock) -> None:
        self._packs = packs
        self._most_pages = most_pages
        self.index = PageIndex()
        self.told = ToldKeys(lock, KEYS_AT_ONCE)
        self.events = EventRing()
        self._also: dict[bytes, dict[int, Place]] = {}
        """Keys of pages that lie in other packs as well, and where."""

    def put(self, known: KnownPack, records: Records, tick: int, *, old: bool) -> list[bytes]:
        """A pack's pages are here.

        Args:
            known: the pack.
            records: of its pages.
            tick: at which they count as written.
            old: whether what is known already wins, also where memory is short.

        Returns:
            The keys of all of them; none where they are not taken in.
        """
        joined = records["key"].tobytes()
        keys = [joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES)]
        if len(set(keys)) < len(keys):
            return []  # nobody writes that
        if len(self.index) + len(keys) > self._most_pages:
            if old:
                known.listed = False
                return []
            self._make_room(len(keys), known.id)
        rows = self.index.find(keys)
        wanted = np.ones(len(keys), np.bool_)
        for at, key in enumerate(keys):
            if key in known.removed:
                wanted[at] = False
            elif rows[at] < 0:
                self._not_also(key, known.id)
            else:
                other = self.index.places(rows[at : at + 1])[0]
                if other.segment != known.id:
                    if old:
                        each = records[at]
                        other = Place(known.id, int(each["offset"]), int(each["length"]), int(each["checksum"]))
                    self._not_also(key, known.id)
                    self._also.setdefault(key, {})[other.segment] = other
                wanted[at] = not old
        chosen = np.flatnonzero(wanted)
        some = records[chosen]
        came = [keys[at] for at in chosen.tolist()]
        ids = np.full(len(chosen), known.id, np.uint64)
        into = self.index.put(came, ids, some["offset"], some["length"], some["checksum"], tick)
        self.told.came(into, came, rows[chosen] < 0)
        return keys

    def drop(self, known: KnownPack, tick: int) -> int:
        """A pack is gone. Returns how many of its pages are now nowhere."""
        rows = self.index.rows_in(known.id)
        keys = self.index.keys(rows)
        for key in [key for key, places in self._also.items() if known.id in places]:
            self._not_also(key, known.id)
        return self.move_or_take_out(rows, keys, tick)

    def forget(self, key: bytes) -> tuple[bool, set[int]]:
        """A page is to be found in no pack any more. Returns whether it was here, and the ids of the packs."""
        row = self.index.find([key])
        ids = set(self._also.pop(key, ()))
        here = bool(row[0] >= 0)
        if here:
            ids.add(self.index.places(row)[0].segment)
            self._take_out(row, [key])
        return here, ids

    def forget_in(self, key: bytes, known: KnownPack, tick: int) -> None:
        """A page is not to be found in this pack any more."""
        self._not_also(key, known.id)
        row = self.index.find([key])
        if row[0] >= 0 and self.index.places(row)[0].segment == known.id:
            self.move_or_take_out(row, [key], tick)

    def move_or_take_out(self, rows: Rows, keys: Sequence[bytes], tick: int) -> int:
        """Pages are where they were no more: those that lie in another pack as well are found there from now on.
        Returns how many are nowhere now."""
        leaving = []
        for at, key in enumerate(keys):
            place = next(iter(self._also.get(key, {}).values()), None)
            if place is None:
                leaving.append(at)
                continue
            self._not_also(key, place.segment)
            one = np.array([place], _PLACES)
            some = one["segment"], one["offset"], one["length"], one["checksum"]
            self.index.put([key], *some, tick, rows[at : at + 1])
        self._take_out(rows[leaving], [keys[at] for at in leaving])
        return len(leaving)

    def forked(self, lock: threading.Lock) -> None:
        """In a child, which knows of no page: the catalog's lock is this one now."""
        self.index = PageIndex()
        self.told = ToldKeys(lock, KEYS_AT_ONCE)

    def own_packs(self, since: int) -> list[PackUse]:
        """This writer's packs, and what counts for whether they leave; ``since``: a tick, behind which a page that was
        read is in recent use."""
        ids = sorted(each.id for each in self._packs)
        live, recent = self.index.bytes_by_segment(ids, since) if ids else ([], [])
        here = dict(zip(ids, zip(live, recent, strict=True), strict=True))
        return [
            PackUse(
                each.id,
                each.pack.size,
                # What is forgotten for now, since a server was ill or memory is short, may be there all the same.
                here[each.id][0] if each.listed and not self._packs.is_doubted(each) else each.pack.size,
                here[each.id][1],
                each.used_at,
            )
            for each in self._packs
            if each.own
        ]

    def empty_packs(self) -> list[int]:
        """Ids of this writer's packs in which no page is left that is not found elsewhere, or could be.

        A page that two writers have stored is found in the other's pack by each of them: both packs stay, or both
        writers would delete theirs.
        """
        empty = [each.id for each in self.own_packs(0) if not each.live_bytes]
        counted_on = {id_ for ids in self._also.values() for id_ in ids} if empty else set()
        return [id_ for id_ in empty if id_ not in counted_on]

    def _make_room(self, pages: int, but: int) -> None:
        """Old packs of others are forgotten first, then this writer's own pages."""
        wanted = max(pages, self._most_pages // _DROPPED_SHARE)
        for known in sorted(self._packs, key=lambda each: (each.own, each.used_at, each.id)):
            if len(self.index) + wanted <= self._most_pages:
                return
            if known.id == but or not known.listed:
                continue
            rows = self.index.rows_in(known.id)
            self._take_out(rows, self.index.keys(rows))
            known.listed = False

    def _not_also(self, key: bytes, id_: int) -> None:
        places = self._also.get(key)
        if places is not None:
            places.pop(id_, None)
            if not places:
                del self._also[key]

    def _take_out(self, rows: Rows, keys: Sequence[bytes]) -> None:
        if self.events.wanted:
            self.events.removed(TIER, list(keys))
        self.index.remove(rows)
        self.told.left(rows, keys)
