"""The key table: from page keys to slots, a hash table of numbers over the slots' columns, at 8 to 16 bytes a page.

Open addressing with linear probing. A page that leaves moves those behind it back, so that nothing ever has to be
rebuilt while the number of pages stays the same.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore.catalog.slot_state import Slot
from kvstore.catalog.slot_table import SlotTable, hash_of
from kvstore.hashing import HASH_BYTES

Found = npt.NDArray[np.int32]
"""Slots; -1 for none."""

_EMPTY = -1
_FEW = 16
"""Up to so many keys a plain loop is faster than NumPy."""
_WINDOW = np.arange(1, 9, dtype=np.uint32)
"""Places that are looked at at once."""
_WORDS = HASH_BYTES // 8


class KeyTable:
    """The slots of findable pages, by key. Each key is here once."""

    def __init__(self, slots: SlotTable) -> None:
        self._slots = slots
        self._places = _empty(1 << 8)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def find(self, key: bytes) -> Slot | None:
        """The slot of a page."""
        slot = self._find(key)
        return slot if slot >= 0 else None

    def find_all(self, keys: Sequence[bytes]) -> Found:
        """The slot of each page, -1 where it has none."""
        if len(keys) <= _FEW:
            return np.array([self._find(key) for key in keys], np.int32)
        words = np.frombuffer(b"".join(keys), np.uint64).reshape(len(keys), -1)
        hashes = np.fromiter(map(hash, keys), np.int64, len(keys)).astype(np.uint32)
        found = self._find_hashes(hashes)
        here = (found >= 0).nonzero()[0]
        if len(here):
            slots, theirs = (found, words) if len(here) == len(keys) else (found[here], words[here])
            if not self._are(slots, theirs):
                for place, slot in zip(here.tolist(), slots.tolist(), strict=True):
                    if self._slots.key(slot) != keys[place]:  # another key of the same hash stood first
                        found[place] = self._find(keys[place])
        return found

    def add(self, slot: Slot) -> bool:
        """Let a page be found from now on. False: another slot has it already."""
        return self.add_all((slot,))[0]

    def add_all(self, added: Sequence[Slot]) -> list[bool]:
        """:meth:`add` for many slots."""
        self.make_room(len(added))
        places, slots, key_hash = self._places, self._slots, self._slots.key_hash
        mask = len(places) - 1
        new: list[bool] = []
        for slot in added:
            wanted = key_hash[slot]
            at = wanted & mask
            while (other := places[at]) != _EMPTY and (
                key_hash[other] != wanted or slots.key(other) != slots.key(slot)
            ):
                at = (at + 1) & mask
            new.append(other == _EMPTY)
            if other == _EMPTY:
                places[at] = slot
                self._count += 1
        return new

    def make_room(self, pages: int) -> None:
        """So many pages more will be added, without memory being asked for then."""
        while 2 * (self._count + pages) > len(self._places):
            self._rebuild()

    def remove_all(self, removed: Sequence[Slot]) -> None:
        """Let pages be found no longer."""
        places, key_hash = self._places, self._slots.key_hash
        mask = len(places) - 1
        for slot in removed:
            free = key_hash[slot] & mask
            while (other := places[free]) != slot:
                assert other != _EMPTY, f"slot {slot} is not findable"
                free = (free + 1) & mask
            at = (free + 1) & mask
            while (other := places[at]) != _EMPTY:
                if (at - key_hash[other]) & mask >= (at - free) & mask:  # its home is not between here and there
                    places[free] = other
                    free = at
                at = (at + 1) & mask
            places[free] = _EMPTY
            self._count -= 1

    def all(self) -> list[Slot]:
        """Every slot that is here, in no order that matters."""
        return [slot for slot in self._places if slot != _EMPTY]

    def _find(self, key: bytes) -> int:
        places, slots = self._places, self._slots
        key_hash, wanted, mask = slots.key_hash, hash_of(key), len(places) - 1
        at = wanted & mask
        while (slot := places[at]) != _EMPTY:
            if key_hash[slot] == wanted and slots.key(slot) == key:
                return slot
            at = (at + 1) & mask
        return _EMPTY

    def _find_hashes(self, hashes: npt.NDArray[np.uint32]) -> Found:
        """For each hash the first slot that has it, -1 for none."""
        places, key_hash = np.frombuffer(self._places, np.int32), np.frombuffer(self._slots.key_hash, np.uint32)
        if not self._count:
            return np.full(len(hashes), _EMPTY, np.int32)
        mask = np.uint32(len(places) - 1)
        # Each looks for its hash, or for the end of the row of places in which it would be: first at its home,
        found = places.take(hashes & mask)
        ended = key_hash.take(found, mode="clip") == hashes
        ended |= found < 0
        pending = (~ended).nonzero()[0]
        wanted = hashes[pending][:, None]
        windows = wanted + _WINDOW
        while len(pending):  # then behind it.
            candidates = places.take(windows & mask)
            stops = key_hash.take(candidates, mode="clip") == wanted
            stops |= candidates < 0
            first = stops.argmax(axis=1)
            rows = np.arange(len(pending))
            found[pending] = candidates[rows, first]
            going = (~stops[rows, first]).nonzero()[0]
            pending, wanted, windows = pending[going], wanted[going], windows[going] + np.uint32(len(_WINDOW))
        return found

    def _are(self, slots: Found, keys: npt.NDArray[np.uint64]) -> bool:
        """Whether these slots have these keys, all of one namespace."""
        numbers = np.frombuffer(self._slots.namespace, np.uint16).take(slots)
        hashes = np.frombuffer(self._slots.block_hashes, np.uint64).reshape(-1, _WORDS).take(slots, axis=0)
        fingerprint = np.frombuffer(self._slots.fingerprint(int(numbers[0])), np.uint64)
        return (
            hashes.tobytes() == keys[:, -_WORDS:].tobytes()
            and bool((numbers == numbers[0]).all())
            and bool((keys[:, :-_WORDS] == fingerprint).all())
        )

    def _put(self, slot: Slot, wanted: int) -> None:
        places = self._places
        mask = len(places) - 1
        at = wanted & mask
        while places[at] != _EMPTY:
            at = (at + 1) & mask
        places[at] = slot

    def _rebuild(self) -> None:
        """Twice the places."""
        old = np.frombuffer(self._places, np.int32)
        slots = old[old != _EMPTY]
        del old
        self._places = _empty(2 * len(self._places))
        places = np.frombuffer(self._places, np.int32)
        homes = np.frombuffer(self._slots.key_hash, np.uint32)[slots] & np.uint32(len(places) - 1)
        order = homes.argsort(kind="stable")
        slots, homes = slots[order], homes[order].astype(np.int64)
        # In the order of their homes each lies in its own one, or behind the one before it.
        numbers = np.arange(len(slots))
        at = np.maximum.accumulate(homes - numbers) + numbers
        inside = at < len(places)
        places[at[inside]] = slots[inside]
        for slot in slots[~inside].tolist():
            self._put(slot, self._slots.key_hash[slot])


def _empty(places: int) -> array[int]:
    return array("i", [_EMPTY]) * places
